"""From a corpus to batches: assets, tokenise and pack, the data plan, the loader."""

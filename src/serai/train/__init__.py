"""Model, parallelism, optimizer and the training loop."""

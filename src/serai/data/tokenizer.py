"""The tokenizer: byte-level BPE, trained on the training documents and kept as a Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from serai.data.cache import build_once
from serai.data.documents import Document
from serai.errors import EnvironmentFault

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["END_OF_TEXT", "TrainedTokenizer", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
"""Closes every document; the only special token."""

_FORMAT = 1
_BATCH = 64


class TrainedTokenizer:
    """A tokenizer folder (``tokenizer.json``, ``tokenizer_config.json``) opened for encoding."""

    def __init__(self, folder: Path) -> None:
        tokenizers = _library()
        self.folder = folder
        self._tokenizer: Tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        end = self._tokenizer.token_to_id(END_OF_TEXT)
        assert end is not None
        self.end_of_text: int = end
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()

    def encode_documents(self, documents: Sequence[Document]) -> Iterable[NDArray[np.uint32]]:
        """Tokens of each document in order, closed by the end-of-text token: ``[tokens] uint32``."""
        for start in range(0, len(documents), _BATCH):
            batch = self._tokenizer.encode_batch_fast([d.text for d in documents[start : start + _BATCH]])
            for encoding in batch:
                yield np.array([*encoding.ids, self.end_of_text], dtype=np.uint32)

    def decode(self, tokens: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def train_tokenizer(documents: Sequence[Document], *, vocab_size: int, cache: Path) -> TrainedTokenizer:
    """Train on ``documents``, or take the tokenizer that the same text and settings gave before.

    The key is the hash of the documents' contents, the settings and the library's version; training is
    deterministic. The vocabulary can come out smaller than ``vocab_size`` if the text has too few
    different words.
    """
    tokenizers = _library()
    settings = {
        "format": _FORMAT,
        "kind": "byte-level BPE",
        "vocab_size": vocab_size,
        "tokenizers": version("tokenizers"),
        "documents": [document.digest for document in documents],
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]
    target = cache / key

    def build(folder: Path) -> None:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            show_progress=False,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        )
        tokenizer.train_from_iterator((d.text for d in documents), trainer=trainer, length=len(documents))
        saved = tokenizer.to_str()
        (folder / "tokenizer.json").write_text(saved, encoding="utf-8")
        _write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": END_OF_TEXT,
                "eos_token": END_OF_TEXT,
                "clean_up_tokenization_spaces": False,
                "model_max_length": 1_000_000_000,
            },
        )
        _write_json(
            folder / "trained.json",
            {
                "schema_version": 1,
                **{name: value for name, value in settings.items() if name != "documents"},
                "documents": len(documents),
                "sha256": hashlib.sha256(saved.encode()).hexdigest(),
            },
        )

    def valid(folder: Path) -> bool:
        try:
            wanted = json.loads((folder / "trained.json").read_text())["sha256"]
            return bool(hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest() == wanted)
        except (OSError, ValueError, KeyError):
            return False

    build_once(target, build, valid=valid)
    return TrainedTokenizer(target)


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")


def _library() -> Any:
    """The ``tokenizers`` package with the modules used here, or how to install it."""
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise EnvironmentFault(
            "the `tokenizers` package is not installed",
            code="S224",
            expected="the `transformers` extra, which native training jobs need",
            next_step="pip install 'serai[transformers]'",
        ) from error
    return tokenizers

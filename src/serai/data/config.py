"""What the job file says about data: which text, how it is tokenised and cut into rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from serai.config import BrokenRule, Config

__all__ = ["CORPORA", "CorpusName", "DataConfig", "TokenizerConfig"]

CorpusName = Literal["shakespeare"]
CORPORA: tuple[CorpusName, ...] = ("shakespeare",)
"""Corpora that serai knows by name; ``serai.data.corpora`` says how each is fetched."""


class TokenizerConfig(Config):
    """A byte-level BPE tokenizer, trained on the training split and cached by content."""

    vocab_size: int = Field(
        4096,
        ge=300,
        le=262_144,
        description="Entries of the vocabulary, special tokens and the 256 bytes included.",
    )


class DataConfig(Config):
    """The text to train on: a corpus that serai knows, or the user's own files."""

    corpus: CorpusName | None = Field(
        None, description="A corpus that serai knows by name. Give either `corpus` or `text`."
    )
    text: Annotated[tuple[str, ...], Field(strict=False)] | None = Field(
        None,
        min_length=1,
        description="Text files, folders or glob patterns of your own, relative to the job file, UTF-8. "
        "Each file is one document. Give either `corpus` or `text`.",
    )
    seq_len: int = Field(256, ge=8, le=1_048_576, description="Tokens in a row: the context the model sees.")
    validation_fraction: float = Field(
        0.05,
        gt=0,
        le=0.5,
        description="Share of the documents that is held out for validation, never trained on.",
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, description="The tokenizer trained on this text."
    )

    def broken_rules(self) -> Iterator[BrokenRule]:
        if self.corpus is None and self.text is None:
            yield BrokenRule(
                key="",
                message="no text to train on",
                expected="`corpus` (a name) or `text` (files of your own)",
                next_step="add `corpus: shakespeare` under `data:`",
            )
        if self.corpus is not None and self.text is not None:
            yield BrokenRule(
                key="text",
                message="both `corpus` and `text` are given",
                expected="one of them",
                next_step="remove `corpus` to train on your own files, or `text` to train on the named corpus",
            )

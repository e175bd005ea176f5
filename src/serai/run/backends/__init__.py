"""Where a run takes place: one file a back end, each with the same four small methods."""

from __future__ import annotations

import importlib

from serai.errors import SpecError
from serai.run.backends.base import Backend

__all__ = ["BACKENDS", "Backend", "backend"]

BACKENDS: dict[str, str] = {
    "local": "serai.run.backends.local.LocalBackend",
}
"""Name → class, imported when it is used."""


def backend(name: str) -> Backend:
    """The back end of that name. Raises ``SpecError`` S533 for one that is not there."""
    try:
        module, _, attribute = BACKENDS[name].rpartition(".")
    except KeyError:
        raise SpecError(
            f"there is no back end {name!r}",
            code="S533",
            expected=f"one of: {', '.join(BACKENDS)}",
            next_step="serai run job.yaml   (runs here)",
        ) from None
    found: type[Backend] = getattr(importlib.import_module(module), attribute)
    return found()

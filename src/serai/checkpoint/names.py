"""Unique names for stored tensors: paths that join alike stay apart."""

from __future__ import annotations

__all__ = ["UniqueNames"]


class UniqueNames:
    """Gives each tensor its own name; the first to ask for one gets it as it is."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, name: str) -> str:
        """``name``, or ``name%2``, ``name%3``, … where it is taken (safetensors keeps ``__metadata__``)."""
        if name in self._taken or name == "__metadata__":
            n = 2
            while f"{name}%{n}" in self._taken:
                n += 1
            name = f"{name}%{n}"
        self._taken.add(name)
        return name

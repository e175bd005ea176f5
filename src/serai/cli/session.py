"""The options that every command takes, before or behind its name, and how a command speaks.

stdout carries data; everything else goes to stderr. With ``--json`` stdout carries exactly one JSON
object (list commands: one a line) and stderr nothing.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

__all__ = [
    "GLOBAL_OPTIONS",
    "SCHEMA_VERSION",
    "Color",
    "Interrupted",
    "PipeClosed",
    "Session",
    "colored",
    "command",
]

SCHEMA_VERSION = 1


class Color(StrEnum):
    """When to colour."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class PipeClosed(Exception):
    """Nobody reads stdout any more (``serai ps | head -1``); nothing failed."""


class Interrupted(Exception):
    """Ctrl-C."""


@dataclass
class Session:
    """What the global options say."""

    json: bool = False
    workspace: Path = Path(".serai")
    quiet: bool = False
    verbose: bool = False
    color: Color = Color.AUTO
    context: Any = None

    def print(self, text: str) -> None:
        """Data for people, on stdout; nothing with ``--json``."""
        if not self.json:
            print(text)

    def note(self, text: str) -> None:
        """Words beside the data, on stderr; nothing with ``--json`` or ``--quiet``."""
        if not self.json and not self.quiet:
            print(text, file=sys.stderr)

    def emit(self, document: dict[str, Any], text: Callable[[], str]) -> None:
        """The one result of a command: the document with ``--json``, else the text."""
        print(json.dumps({"schema_version": SCHEMA_VERSION, **document}) if self.json else text(), flush=True)

    def emit_lines(self, documents: Iterable[dict[str, Any]]) -> None:
        """A list as JSON lines."""
        for document in documents:
            print(json.dumps({"schema_version": SCHEMA_VERSION, **document}))

    def style(self, text: str, style: str, *, stream: TextIO | None = None) -> str:
        """Text in a style (``bold``, ``dim``, ``red``, ``green``, ``yellow``, ``cyan``), if the stream takes colour."""
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if colored(self.color, stream or sys.stdout) else text


_STYLES = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36"}


def colored(color: Color, stream: TextIO) -> bool:
    """Whether to colour a stream: ``--color`` first, then NO_COLOR and TERM, then whether it is a terminal."""
    if color is not Color.AUTO:
        return color is Color.ALWAYS
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def _print_version(value: bool) -> None:
    if not value:
        return
    from serai import __version__

    arguments = sys.argv[1:]
    as_json = "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
    print(
        json.dumps({"schema_version": SCHEMA_VERSION, "version": __version__})
        if as_json
        else f"serai {__version__}"
    )
    raise typer.Exit


_GLOBALS = {
    "json": (bool, False, typer.Option("--json", help="One JSON object on stdout (lists: one a line), nothing else.")),
    "workspace": (
        Path | None,
        None,
        typer.Option("--workspace", metavar="PATH", help="Folder of the runs; .serai in the current folder if not given."),
    ),
    "quiet": (bool, False, typer.Option("--quiet", "-q", help="Results and errors only.")),
    "verbose": (bool, False, typer.Option("--verbose", "-v", help="Print the traceback with an error.")),
    "color": (Color | None, None, typer.Option("--color", help="When to colour; NO_COLOR is respected.")),
    "version": (
        bool,
        False,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ),
}  # fmt: skip
GLOBAL_OPTIONS = frozenset(_GLOBALS)


def command(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Gives a command the global options; the function gets a ``Session`` as its first argument.

    Options before the command and behind it add up; of two workspaces the one behind the command holds.
    """
    signature = inspect.signature(function, eval_str=True)
    own = list(signature.parameters.values())[1:]

    @functools.wraps(function)
    def wrapper(context: typer.Context, **values: Any) -> int | None:
        options = {name: values.pop(name) for name in _GLOBALS}
        session = context.ensure_object(Session)
        session.context = context
        session.json |= options["json"]
        session.quiet |= options["quiet"]
        session.verbose |= options["verbose"]
        session.workspace = options["workspace"] or session.workspace
        session.color = options["color"] or session.color
        try:
            return function(session, **values)
        except BrokenPipeError:
            raise PipeClosed from None
        except KeyboardInterrupt:
            raise Interrupted from None

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    globals_ = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )
        for name, (kind, default, option) in _GLOBALS.items()
    ]
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    wrapper.__signature__ = inspect.Signature([context, *own, *globals_])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {
        parameter.name: parameter.annotation for parameter in (context, *own, *globals_)
    }
    del wrapper.__wrapped__
    return wrapper

"""How a failure is printed: the line that is wrong with a caret under it, or one JSON object."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
import unicodedata
from typing import Any

from serai.cli.session import SCHEMA_VERSION, Color, colored
from serai.errors import Problem, SeraiError, SpecError

__all__ = ["print_failure", "print_unexpected", "render_error", "render_problem"]

_WIDEST_SOURCE = 110


def print_failure(error: SeraiError, *, as_json: bool, color: Color, verbose: bool) -> None:
    """One JSON object on stdout, or the error as people read it on stderr; with ``-v`` its traceback first."""
    if as_json:
        print(json.dumps(error.to_json()), flush=True)
    else:
        if verbose:
            print("".join(traceback.format_exception(error)), file=sys.stderr)
        print(render_error(error, color=colored(color, sys.stderr)), file=sys.stderr, flush=True)


def print_unexpected(error: BaseException, *, as_json: bool, color: Color, verbose: bool) -> None:
    """A mistake in serai itself: short and honest, the traceback in a file (or here with ``-v``)."""
    text = "".join(traceback.format_exception(error))
    path = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="serai-traceback-", suffix=".txt", delete=False
        ) as stream:
            stream.write(text)
            path = stream.name
    except OSError:
        pass
    message = f"serai itself failed: {type(error).__name__}: {error}".rstrip(": ")
    if as_json:
        document = {
            "schema_version": SCHEMA_VERSION,
            "error": {
                "code": "S000",
                "kind": type(error).__name__,
                "message": message,
                "where": path,
                "expected": None,
                "next": "report it with the traceback",
                "traceback": text,
            },
            "exit_code": 1,
        }
        print(json.dumps(document), flush=True)
        return
    paint = _painter(colored(color, sys.stderr))
    lines = [f"{paint('error[S000]', 'red')}: {paint(message, 'bold')}"]
    if verbose:
        lines.append(text.rstrip())
    if path is not None:
        lines.append(f"   = traceback: {path}")
    lines.append("   = next: this is a mistake in serai, not yours: report it with the traceback")
    print("\n".join(lines), file=sys.stderr, flush=True)


def render_error(error: SeraiError, *, color: bool = False) -> str:
    """An error with every problem that it holds."""
    paint = _painter(color)
    problems = error.problems if isinstance(error, SpecError) else []
    if not problems:
        lines = [f"{paint(f'error[{error.code}]', 'red')}: {paint(error.message, 'bold')}"]
        if error.where:
            lines.append(f"  {paint('-->', 'cyan')} {error.where}")
        lines += _remarks(error.expected, error.next_step, paint)
        return "\n".join(lines)
    parts = [render_problem(problem, color=color) for problem in problems]
    if len(problems) > 1 or error.message != problems[0].message:
        closing = f"{paint('error', 'red')}: {error.message}"
        if error.next_step and len(problems) > 1:
            closing += "\n" + "\n".join(_remarks(error.expected, error.next_step, paint))
        parts.append(closing)
    return "\n\n".join(parts)


def render_problem(problem: Problem, *, color: bool = False) -> str:
    """One problem: what was true, where, the line with a caret, what was expected, what to type."""
    paint = _painter(color)
    lines = [f"{paint(f'error[{problem.code}]', 'red')}: {paint(problem.message, 'bold')}"]
    gutter = 1
    if problem.file == "--set":
        lines.append(f"  {paint('-->', 'cyan')} --set {problem.source or ''}".rstrip())
    elif problem.file is not None:
        position = ":".join(
            str(part) for part in (problem.file, problem.line, problem.column) if part is not None
        )
        lines.append(f"  {paint('-->', 'cyan')} {position}")
    elif problem.key is not None:
        lines.append(f"  {paint('-->', 'cyan')} {problem.key}")
    if problem.source is not None and problem.column is not None:
        number = "" if problem.file == "--set" else str(problem.line or "")
        gutter = max(1, len(number))
        source, before, width = _window(problem.source, problem.column, problem.width)
        bar = paint("|", "cyan")
        lines.append(f"{'':{gutter}} {bar}")
        lines.append(f"{paint(f'{number:>{gutter}}', 'cyan')} {bar} {source}".rstrip())
        lines.append(f"{'':{gutter}} {bar} {' ' * before}{paint('^' * width, 'red')}")
    return "\n".join(lines + _remarks(problem.expected, problem.next_step, paint, indent=gutter + 1))


def _remarks(expected: str | None, next_step: str | None, paint: Any, *, indent: int = 2) -> list[str]:
    lines = []
    for title, text in (("expected", expected), ("next", next_step)):
        if text:
            lines.append(f"{'':{indent}}{paint('=', 'cyan')} {title}: {text}")
    return lines


def _window(source: str, column: int, width: int) -> tuple[str, int, int]:
    """The part of a line that fits beside the caret: its text, the cells before the caret, the caret's width."""
    text = "".join(
        " "
        if character == "\t"
        else "\ufffd"
        if unicodedata.category(character) in ("Cc", "Cf", "Cs")
        else character
        for character in source
    )
    start = 0
    if len(text) > _WIDEST_SOURCE:
        start = max(0, min(column - 1 - _WIDEST_SOURCE // 2, len(text) - _WIDEST_SOURCE))
        text = text[start : start + _WIDEST_SOURCE]
    before = column - 1 - start
    marked = text[before : before + width]
    return text, _cells(text[:before]), max(1, _cells(marked))


def _cells(text: str) -> int:
    """Terminal cells that a text takes: East Asian wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def _painter(color: bool) -> Any:
    codes = {"red": "1;31", "bold": "1", "cyan": "36"}
    return lambda text, style: f"\x1b[{codes[style]}m{text}\x1b[0m" if color else text

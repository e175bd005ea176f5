"""``serai explain``: the codes of errors, the keys of the job file, its JSON Schema."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer

from serai.cli.session import Session, command

__all__ = ["explanations", "main"]


def explanations() -> dict[str, dict[str, str]]:
    """Every code with its title, rule, reason and fix."""
    import tomllib
    from importlib.resources import files

    return tomllib.loads(files("serai").joinpath("explanations.toml").read_text(encoding="utf-8"))


@command
def main(
    session: Session,
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[CODE|KEY|job]", help="A code (S101), a key (train.steps), or job for all keys."
        ),
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the job file.")] = False,
) -> None:
    """Explain an error code or a key of the job file; list the codes."""
    from serai.errors import SpecError

    if schema and subject is not None:
        raise SpecError(
            "both `--schema` and a subject are given",
            code="S150",
            where="serai explain",
            next_step="serai explain --schema",
        )
    if schema:
        from serai.spec.schema import job_schema

        print(json.dumps(job_schema(), indent=None if session.json else 2))
    elif subject is None:
        _list_codes(session)
    elif subject == "job":
        _explain_keys(session, None)
    elif re.fullmatch(r"[sS]\d{3}", subject):
        _explain_code(session, subject.upper())
    else:
        _explain_keys(session, subject)


def _list_codes(session: Session) -> None:
    known = explanations()
    if session.json:
        session.emit_lines({"code": code, "title": entry["title"]} for code, entry in known.items())
        return
    session.print("\n".join(f"{code}  {entry['title']}" for code, entry in known.items()))
    session.note(
        "\nserai explain CODE: rule, reason and fix; serai explain KEY: a key of the job file; serai explain job: all keys"
    )


def _explain_code(session: Session, code: str) -> None:
    from serai.errors import SpecError

    known = explanations()
    if code not in known:
        near = [other for other in known if other[:2] == code[:2]]
        raise SpecError(
            f"there is no code {code}",
            code="S153",
            expected=f"one of: {', '.join(near or known)}",
            next_step="serai explain",
        )
    entry = known[code]

    import textwrap

    def text() -> str:
        lines = [f"{session.style(code, 'bold')}  {entry['title']}", ""]
        for part in ("rule", "reason", "fix"):
            wrapped = textwrap.wrap(entry[part], width=92, break_long_words=False, break_on_hyphens=False)
            lines += [f"  {part if index == 0 else '':<8}{line}" for index, line in enumerate(wrapped)]
        return "\n".join(lines)

    session.emit({"code": code, **entry}, text)


def _explain_keys(session: Session, path: str | None) -> None:
    from serai.errors import SpecError
    from serai.spec.fields import SpecKey, find_key, list_keys, suggest_key

    key = None if path is None else find_key(path)
    if path is not None and key is None:
        near = suggest_key(path)
        raise SpecError(
            f"there is no code and no key {path!r}",
            code="S153",
            expected="a code such as S101, a key such as train.learning_rate, or job",
            next_step=f"serai explain {near}" if near else "serai explain job",
        )
    shown = [
        other
        for other in list_keys()
        if key is None or other.path == key.path or other.path.startswith(f"{key.path}.")
    ]

    def document(entry: SpecKey) -> dict[str, Any]:
        return {
            "key": entry.path,
            "takes": entry.kind,
            "required": entry.required,
            "default": entry.default,
            "description": entry.description,
        }

    if session.json and key is not None and not key.section:
        session.emit(document(key), str)
    elif session.json:
        session.emit_lines(document(entry) for entry in shown)
    else:
        session.print("\n\n".join(_key_text(session, entry) for entry in shown))


def _key_text(session: Session, entry: Any) -> str:
    import textwrap

    default = (
        "required" if entry.required else f"default {entry.default}" if entry.default is not None else ""
    )
    head = f"{session.style(entry.path, 'bold')}: {entry.kind}" + (f" ({default})" if default else "")
    return "\n".join(
        [head, *textwrap.wrap(entry.description, width=92, initial_indent="  ", subsequent_indent="  ")]
    )

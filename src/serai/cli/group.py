"""How ``--help`` looks: commands in the order of the work, the global options in a section of their own."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from serai.cli.session import GLOBAL_OPTIONS

__all__ = ["PANELS", "Command", "Group"]

PANELS = {
    "Start": ("init",),
    "Run": ("plan", "run", "drill", "stop"),
    "Look": ("ps", "show", "logs"),
    "Keep": ("ckpt",),
    "Explain": ("explain", "bench"),
}
"""The commands as DESIGN.md orders them."""


class Command(TyperCommand):
    """A command whose help shows its own options first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)


class Group(TyperGroup):
    """A command with commands below it."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_commands(self, ctx, formatter)
        _write_parameters(self, ctx, formatter)

    def list_commands(self, ctx: Any) -> list[str]:
        ordered = [name for names in PANELS.values() for name in names if name in self.commands]
        return ordered + [name for name in self.commands if name not in ordered]


def _write_commands(group: Group, ctx: Any, formatter: Any) -> None:
    """One aligned line a command, the same column in every panel."""
    known = group.list_commands(ctx)
    width = max((len(name) for name in known), default=0) + 2
    panels = {title: [name for name in names if name in known] for title, names in PANELS.items()}
    placed = {name for names in panels.values() for name in names}
    panels["Commands"] = [name for name in known if name not in placed]
    for title, names in panels.items():
        if not names:
            continue
        with formatter.section(title):
            for name in names:
                command = group.get_command(ctx, name)
                assert command is not None
                summary = command.get_short_help_str(limit=formatter.width - width - 2)
                formatter.write(f"{'':{formatter.current_indent}}{name:<{width}}{summary}\n")


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], "Global options": []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            sections["Arguments"].append(record)
        elif parameter.name in GLOBAL_OPTIONS or parameter.name == "help":
            sections["Global options"].append(record)
        else:
            sections["Options"].append(record)
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)

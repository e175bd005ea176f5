"""The entry point of ``serai``: the commands, and what every failure turns into.

Exit codes: 0 done, 1 failed and a retry will not help, 2 bad usage or spec, 3 a gate was not met,
69 a service cannot be reached, 75 stopped early and resumable, 130 Ctrl-C.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import typer

from serai.cli import bench, ckpt, drill, explain, init, logs, plan, ps, run, show, stop
from serai.cli.group import Command, Group
from serai.cli.session import Color, Interrupted, PipeClosed, Session, command
from serai.errors import SeraiError, SpecError

__all__ = ["app", "main"]

app = typer.Typer(
    name="serai",
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 110},
)


@app.callback(invoke_without_command=True)
@command
def _root(session: Session) -> None:
    """Train PyTorch models that run for days: run, checkpoint, resume, look."""
    if session.context.invoked_subcommand is None:
        if session.json:
            raise SpecError("no command was given", code="S150", where="serai", next_step="serai --help")
        print(session.context.get_help())


for _name, _module in {
    "init": init,
    "plan": plan,
    "run": run,
    "drill": drill,
    "stop": stop,
    "ps": ps,
    "show": show,
    "logs": logs,
    "explain": explain,
    "bench": bench,
}.items():
    app.command(_name, cls=Command)(_module.main)
app.add_typer(ckpt.app, name="ckpt")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without `≥` shows `?`, not a traceback
    given = sys.argv[1:] if arguments is None else arguments
    code = _run(given)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    as_json, verbose, color = _early_options(arguments)
    try:
        return _dispatch(arguments)
    except (PipeClosed, BrokenPipeError):
        _forget_stdout()
        return 0
    except (Interrupted, KeyboardInterrupt, typer.Abort):
        if as_json:
            from serai.cli.failures import print_failure

            print_failure(
                _InterruptedRun("interrupted by Ctrl-C", code="S151"),
                as_json=True,
                color=color,
                verbose=False,
            )
        return _InterruptedRun.exit_code
    except SeraiError as error:
        from serai.cli.failures import print_failure

        print_failure(error, as_json=as_json, color=color, verbose=verbose)
        return error.exit_code
    except Exception as error:
        from serai.cli.failures import print_unexpected

        print_unexpected(error, as_json=as_json, color=color, verbose=verbose)
        return 1


def _dispatch(arguments: list[str]) -> int:
    try:
        result: Any = typer.main.get_command(app).main(arguments, prog_name="serai", standalone_mode=False)
    except typer.TyperException as error:
        raise _usage_error(error) from error
    return result if isinstance(result, int) else 0


class _InterruptedRun(SeraiError):
    exit_code = 130


def _early_options(arguments: list[str]) -> tuple[bool, bool, Color]:
    """What a failure must know even when the arguments cannot be parsed."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    color = Color.AUTO
    for index, argument in enumerate(own):
        value = argument.partition("=")[2] if argument.startswith("--color=") else ""
        if argument == "--color" and index + 1 < len(own):
            value = own[index + 1]
        if value in set(Color):
            color = Color(value)
    return "--json" in own, bool({"-v", "--verbose"} & set(own)), color


def _usage_error(error: typer.TyperException) -> SpecError:
    context = getattr(error, "ctx", None)
    path = str(context.command_path) if context is not None else "serai"
    message = error.format_message().rstrip(".").replace("\n\t", " ")
    return SpecError(message[:1].lower() + message[1:], code="S150", where=path, next_step=f"{path} --help")


def _forget_stdout() -> None:
    """Points stdout at nothing, so that the interpreter's last flush does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

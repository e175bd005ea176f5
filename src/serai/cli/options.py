"""Arguments and options that several commands take, each written once."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["JobFile", "Overrides"]

JobFile = Annotated[str, typer.Argument(metavar="JOB", help="The job file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a value, such as train.steps=100; may be repeated."
    ),
]

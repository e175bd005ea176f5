"""``serai ckpt diff``: which tensors and values differ between two checkpoints, and by how much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from serai.cli.ckpt_common import Progress, Target, checkpoint_root
from serai.cli.runs import complete_run
from serai.cli.session import Session, command

if TYPE_CHECKING:
    from serai.checkpoint.diff import DiffReport, TensorDiff

__all__ = ["main"]


@command
def main(
    session: Session,
    left: Target = "@last",
    right: Annotated[
        str | None,
        typer.Argument(
            metavar="[REF|ROOT]",
            help="The other side; the same place if not given.",
            autocompletion=complete_run,
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(
            "--step", metavar="N", help="Once for both sides, or twice: first the left, then the right one."
        ),
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option("--keys", metavar="NAME", help="Only what is below this name; may be repeated."),
    ] = None,
) -> int:
    """Compare two checkpoints bit for bit; exit 1 if they differ. Of one root: the two newest."""
    from serai.checkpoint.diff import diff
    from serai.checkpoint.stream import open_stream

    steps = list(step or [])
    root = checkpoint_root(session, left)
    other = root if right is None else checkpoint_root(session, right)
    first, second = _steps(root, steps, one_place=right is None)
    with Progress(session, "compared") as progress:
        report = diff(open_stream(root, first), open_stream(other, second), keys=keys, progress=progress)
    session.emit(_document(report), lambda: _text(session, report))
    return 0 if report.same else 1


def _steps(root: str, steps: list[int], *, one_place: bool) -> tuple[int | None, int | None]:
    from serai.errors import SpecError

    if len(steps) == 2:
        return steps[0], steps[1]
    if len(steps) > 2:
        raise SpecError("--step was given more than twice", code="S150", where="serai ckpt diff")
    if not one_place:
        return (steps[0], steps[0]) if steps else (None, None)
    from serai.checkpoint.catalog import generations

    if steps:
        raise SpecError(
            "one root and one step leave nothing to compare",
            code="S150",
            where="serai ckpt diff",
            expected="two steps, or two places",
            next_step=f"serai ckpt diff {root} --step {steps[0]} --step N",
        )
    found = list(dict.fromkeys(generation.step for generation in generations(root)))
    if len(found) == 1:
        raise SpecError(
            f"{root} has one checkpoint only",
            code="S150",
            where="serai ckpt diff",
            expected="two steps, or two places",
            next_step="serai ckpt diff ROOT OTHER",
        )
    # With none at all, opening says so.
    return (found[1], found[0]) if found else (None, None)


def _document(report: DiffReport) -> dict[str, Any]:
    return {
        "same": report.same,
        "left": {"name": report.left, "step": report.left_step},
        "right": {"name": report.right, "step": report.right_step},
        "equal_tensors": report.equal_tensors,
        "bytes": report.bytes,
        "tensors": [
            {
                "name": t.name,
                "kind": t.kind,
                "left": t.left,
                "right": t.right,
                "count": t.count,
                "total": t.total,
                "max_abs": t.max_abs,
                "max_rel": t.max_rel,
                "not_finite": t.not_finite,
            }
            for t in report.tensors
        ],
        "values": [{"path": v.path, "left": v.left, "right": v.right} for v in report.values],
        "exit_code": 0 if report.same else 1,
    }


def _text(session: Session, report: DiffReport) -> str:
    from serai.cli.runs import table

    head = f"step {report.left_step} ({report.left}) and step {report.right_step} ({report.right})"
    if report.same:
        return f"{head}: all {report.equal_tensors} tensors and every value are equal, bit for bit"
    lines = [
        f"{head}: {len(report.tensors)} tensors and {len(report.values)} values differ, "
        f"{report.equal_tensors} tensors are equal"
    ]
    if report.tensors:
        rows = [[t.name, _what(t), _number(t.max_abs), _number(t.max_rel)] for t in report.tensors]
        lines += ["", table(["TENSOR", "DIFFERS", "MAX ABS", "MAX REL"], rows, right={2, 3})]
    if report.values:
        cells = [[v.path, _short(v.left), _short(v.right)] for v in report.values]
        lines += ["", table(["VALUE", "LEFT", "RIGHT"], cells)]
    return "\n".join(lines)


def _what(tensor: TensorDiff) -> str:
    if tensor.kind == "missing":
        return f"only left: {tensor.left}"
    if tensor.kind == "extra":
        return f"only right: {tensor.right}"
    if tensor.kind != "values":
        return f"{tensor.kind}: {tensor.left} and {tensor.right}"
    odd = f", {tensor.not_finite} not finite" if tensor.not_finite else ""
    return f"{tensor.count} of {tensor.total}{odd}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _short(text: str, width: int = 40) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"

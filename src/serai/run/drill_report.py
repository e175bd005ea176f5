"""What a drill found: the faults, what each cost, and whether anything came out differently."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from serai.events import read_events
from serai.run.workspace import Run
from serai.units import format_duration

__all__ = ["DrillReport", "FaultOutcome", "Injected", "compare"]


@dataclass(frozen=True)
class Injected:
    """A fault that struck after ``at_step`` of ``attempt``; ``time`` in unix seconds."""

    fault: str
    at_step: int
    attempt: int
    time: float


@dataclass(frozen=True)
class FaultOutcome:
    """What a fault led to.

    Attributes:
        at_step: the last step that was done when it struck.
        resumed_from: step of the checkpoint that the next attempt restored; ``None``: it began anew.
        tier: where that checkpoint came from.
        lost_s: seconds from the fault until training was again where it had been.
    """

    fault: str
    at_step: int
    resumed_from: int | None
    tier: str | None
    lost_s: float | None


@dataclass(frozen=True)
class DrillReport:
    """The result of a drill.

    Attributes:
        identical: every loss of every step, repeated ones included, has the same bits as in the untouched run,
            and so have the final weights where they could be compared.
        max_loss_difference: greatest absolute difference over all steps.
        differing_steps: steps whose loss differs or is missing, in order.
        weights_identical: ``None`` when there were no checkpoints to compare.
        resumes: attempts that restored a checkpoint.
        seconds: of the whole drill; ``reference_s`` of it the untouched run, preparation included.
    """

    identical: bool
    max_loss_difference: float
    steps: int
    executions: int
    differing_steps: list[int]
    weights_identical: bool | None
    faults: list[FaultOutcome]
    resumes: int
    seconds: float
    reference_s: float
    folder: str

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self)}

    def text(self) -> str:
        """The table of faults and the verdict."""
        rows = [("FAULT", "AT STEP", "RESUMED FROM", "TIER", "LOST")]
        for fault in self.faults:
            lost = "-" if fault.lost_s is None else format_duration(fault.lost_s)
            start = "the start" if fault.resumed_from is None else f"step {fault.resumed_from}"
            rows.append((fault.fault, str(fault.at_step), start, fault.tier or "-", lost))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        weights = {True: ", final weights too", False: "", None: ""}[self.weights_identical]
        again = self.executions - self.steps
        lines.append("")
        if self.identical:
            lines.append(
                f"identical: {self.steps} steps have the same loss to the last bit{weights} "
                f"({len(self.faults)} faults, {self.resumes} resumes, {again} steps run again)"
            )
        else:
            what = (
                f"{len(self.differing_steps)} of {self.steps} steps, first step {self.differing_steps[0]}, "
                f"by up to {self.max_loss_difference:.3g}"
                if self.differing_steps
                else "the losses agree, the final weights do not"
            )
            lines.append(f"NOT identical: {what}")
        lines.append(
            f"{format_duration(self.seconds)} in all, {format_duration(self.reference_s)} of it untouched; in {self.folder}"
        )
        return "\n".join(lines)


def compare(
    untouched: Run,
    struck: Run,
    injected: list[Injected],
    *,
    same_weights: bool | None,
    reference_s: float,
    seconds: float,
) -> DrillReport:
    """Compare every execution of every step of the struck run with the untouched run."""
    expected = {int(event["step"]): event for event in untouched.steps()}
    executions = list(struck.steps())
    differing = set(expected).symmetric_difference(int(event["step"]) for event in executions)
    greatest = 0.0
    for event in executions:
        other = expected.get(int(event["step"]))
        if other is None:
            continue
        if _bits(event) != _bits(other):
            differing.add(int(event["step"]))
            greatest = max(greatest, abs(float(event["loss"]) - float(other["loss"])))
    restored = list(read_events(struck.rank_events(0), kind="restored"))
    return DrillReport(
        identical=bool(expected) and not differing and same_weights is not False,
        max_loss_difference=greatest,
        steps=len(expected),
        executions=len(executions),
        differing_steps=sorted(differing),
        weights_identical=same_weights,
        faults=[_outcome(fault, executions, restored) for fault in injected],
        resumes=len(restored),
        seconds=seconds,
        reference_s=reference_s,
        folder=str(struck.path.parent.parent),
    )


def _bits(event: dict[str, Any]) -> str:
    """The loss as hexadecimal digits: equal only when every bit is."""
    return str(event.get("loss_hex") or float(event["loss"]).hex())


def _outcome(
    fault: Injected, executions: list[dict[str, Any]], restored: list[dict[str, Any]]
) -> FaultOutcome:
    resume = next((event for event in restored if int(event["attempt"]) > fault.attempt), None)
    later = [event for event in executions if int(event["attempt"]) > fault.attempt]
    if resume is not None and later and int(resume["attempt"]) > int(later[0]["attempt"]):
        resume = None  # the next attempt began anew; that restore belongs to one after it
    wanted = (
        fault.at_step if resume is None or int(resume["step"]) < fault.at_step else int(resume["step"]) + 1
    )
    back = next((float(event["time"]) for event in later if int(event["step"]) >= wanted), None)
    return FaultOutcome(
        fault=fault.fault,
        at_step=fault.at_step,
        resumed_from=None if resume is None else int(resume["step"]),
        tier=None if resume is None else resume.get("tier"),
        lost_s=None if back is None else back - fault.time,
    )

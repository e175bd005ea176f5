"""Counting outcomes by kind of fault, and the table that is printed."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["Outcome", "Tally"]


class Outcome(enum.Enum):
    """What a fault led to. The last two are never allowed."""

    NEWEST = "right newest"
    OLDER = "older, verified"
    ERROR = "error"
    WRONG = "WRONG"
    HUNG = "HUNG"


@dataclass
class Tally:
    """Outcomes by (engine, kind of fault), with the first few descriptions of what must never happen."""

    counts: dict[tuple[str, str], dict[Outcome, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, kind: str, outcome: Outcome, detail: str = "", *, engine: str = "serai") -> None:
        row = self.counts.setdefault((engine, kind), dict.fromkeys(Outcome, 0))
        row[outcome] += 1
        if outcome in (Outcome.WRONG, Outcome.HUNG) and len(self.problems) < 400:
            self.problems.append(f"{engine}, {kind}: {outcome.value}: {detail}")

    def total(self, engine: str = "serai") -> int:
        return sum(sum(row.values()) for (who, _), row in self.counts.items() if who == engine)

    def forbidden(self, engine: str = "serai") -> int:
        """How many faults led to wrong bytes, a lost checkpoint or a hang."""
        return sum(
            row[Outcome.WRONG] + row[Outcome.HUNG] for (who, _), row in self.counts.items() if who == engine
        )

    def table(self, engine: str) -> str:
        """GitHub-flavoured Markdown, aligned."""
        rows = [["fault", "injected", *(outcome.value for outcome in Outcome)]]
        sums = dict.fromkeys(Outcome, 0)
        for (who, kind), row in self.counts.items():
            if who == engine:
                rows.append([kind, str(sum(row.values())), *(str(row[outcome]) for outcome in Outcome)])
                for outcome in Outcome:
                    sums[outcome] += row[outcome]
        rows.append(["all", str(sum(sums.values())), *(str(sums[outcome]) for outcome in Outcome)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "| "
            + " | ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            + " |"
            for row in rows
        ]
        rule = (
            "|"
            + "|".join(("-" * (w + 1)).join(("", "-" if c == 0 else ":")) for c, w in enumerate(widths))
            + "|"
        )
        return "\n".join([lines[0], rule, *lines[1:]])

"""Run the campaign and print its table; exit 1 when anything forbidden happened."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import time
from datetime import date
from pathlib import Path

import torch

import serai
from benchmarks.faults.campaign import PARTS, run
from benchmarks.faults.tally import Tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="the tests' version: a sample, under a minute")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part, may be given again")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    parser.add_argument(
        "--markdown", type=Path, help="also write the table, the machine and the command here"
    )
    options = parser.parse_args()
    for name in ("serai", "torch.distributed.checkpoint"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # their warnings are what is provoked here
    began = time.monotonic()

    def progress(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", file=sys.stderr, flush=True)

    tally = Tally()
    run(tally, seed=options.seed, short=options.short, only=options.only, progress=progress)
    seconds = time.monotonic() - began
    if options.json:
        print(json.dumps(as_json(tally, options.seed, seconds)))
    else:
        print(text(tally))
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(report(tally, options, seconds))
    return 1 if tally.forbidden() else 0


def text(tally: Tally) -> str:
    engines = dict.fromkeys(engine for engine, _ in tally.counts)
    parts = [f"{engine}\n{tally.table(engine)}" for engine in engines]
    mine = [problem for problem in tally.problems if problem.startswith("serai, ")]
    if mine:
        parts.append("\n".join(["What must never happen, and did:", *mine[:40]]))
    return "\n\n".join(parts)


def as_json(tally: Tally, seed: int, seconds: float) -> dict[str, object]:
    return {
        "schema_version": 1,
        "seed": seed,
        "seconds": round(seconds, 1),
        "injected": tally.total(),
        "forbidden": tally.forbidden(),
        "rows": [
            {"engine": engine, "fault": kind, **{outcome.name.lower(): n for outcome, n in row.items()}}
            for (engine, kind), row in tally.counts.items()
        ],
        "problems": tally.problems,
    }


def report(tally: Tally, options: argparse.Namespace, seconds: float) -> str:
    command = " ".join(["python -m benchmarks.faults", *(a for a in sys.argv[1:] if "markdown" not in a)])
    lines = [
        "# The fault campaign",
        "",
        f"{date.today().isoformat()}, serai {serai.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {cpu()}, {len(os.sched_getaffinity(0))} cores, Linux "
        f"{platform.release()}. Seed {options.seed}, {seconds:.0f} s. To repeat:",
        "",
        "```sh",
        command,
        "```",
        "",
        "*right newest*: the newest durable step came back, bit for bit (or nothing, where nothing was durable "
        "yet). *older, verified*: the newest was damaged and an older one came back, with a warning. *error*: "
        "nothing verified, or the save said that it failed. *WRONG*: other bytes, a lost durable step, silence "
        "about a damage, a dead thread. *HUNG*: no answer within the deadline.",
    ]
    for engine in dict.fromkeys(engine for engine, _ in tally.counts):
        lines += ["", f"## {engine}", "", tally.table(engine)]
        bad = [problem for problem in tally.problems if problem.startswith(f"{engine}, ")]
        if bad:
            lines += [
                "",
                "The first of what must never happen:",
                "",
                *(f"- {problem}" for problem in bad[:12]),
            ]
    return "\n".join(lines) + "\n"


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())

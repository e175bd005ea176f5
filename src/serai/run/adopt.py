"""What ``serai run`` does with a run of that name that is already there."""

from __future__ import annotations

import json
import shlex

from serai.run.console import Console
from serai.run.workspace import Run, write_atomic
from serai.spec.difference import changed_spec_error, spec_difference
from serai.spec.resolve import ResolvedSpec, load_resolved

__all__ = ["adopt"]


def adopt(run: Run, spec: ResolvedSpec, *, console: Console) -> bool:
    """Make the spec the run's own; False when the run is finished and there is nothing to do.

    What may change under one name (retries, layout, cadence, more ``train.steps``) takes effect; anything
    else is an error that shows the difference. The caller holds the run lock.

    Raises:
        SpecError: S127 with every difference.
    """
    state = run.state()
    old, new = load_resolved(run.resolved_path), spec.document
    differences = spec_difference(old, new)
    grown = [entry for entry in differences if entry.key == "train.steps" and entry.new > entry.old]
    if others := [entry for entry in differences if entry not in grown]:
        raise changed_spec_error(run.name, others, where=spec.path)
    overrides = [part for override in spec.overrides for part in ("--set", override)]
    command = shlex.join(["serai", "run", spec.path, *overrides])
    where = {"job_file": spec.path, "job_folder": str(spec.folder), "command": command}
    if int(state.get("attempts", 0)) == 0 and not differences:
        run.update(**where)
        return True
    if state["status"] == "finished" and not grown:
        console.line(
            f"{run.name} is finished already ({run.id}): serai show {run.name}   "
            f"(to train on: raise train.steps; to start anew: another name)"
        )
        return False
    write_atomic(run.resolved_path, json.dumps(spec.to_json(), indent=2) + "\n")
    write_atomic(run.spec_path, spec.text)
    run.update(**where)
    more = f", train.steps grew from {grown[0].old} to {grown[0].new}" if grown else ""
    console.line(
        f"resuming {run.name} ({run.id}, {state['status']} after {state['attempts']} attempts{more})"
    )
    return True

"""The end of a run: ``report.json``, one self-contained ``report.html``, and a summary of a few lines."""

from __future__ import annotations

import json
from typing import Any

from serai.run.causes import Failure
from serai.run.report_data import collect
from serai.run.workspace import Run, write_atomic
from serai.units import format_duration

__all__ = ["collect", "failure_document", "save", "summary", "write"]


def write(run: Run) -> dict[str, Any]:
    """Write both files of a run, alive or ended, and return the document."""
    document = collect(run)
    save(run, document)
    return document


def save(run: Run, document: dict[str, Any]) -> None:
    """Write a collected document as ``report.json`` and ``report.html``."""
    from serai.run.report_html import render

    write_atomic(run.report_json, json.dumps(document, indent=1) + "\n")
    write_atomic(run.report_html, render(document))


def failure_document(failure: Failure, *, host: str, attempt: int) -> dict[str, Any]:
    """What a failed run says: cause class, first failing rank and host, traceback, log (STYLE 19)."""
    return {
        "cause": failure.cause.value,
        "code": failure.rule.code,
        "words": failure.rule.words,
        "rank": failure.rank,
        "host": host,
        "attempt": attempt,
        "message": failure.message,
        "traceback": failure.traceback,
        "log": str(failure.log) if failure.log else None,
        "advice": failure.rule.advice,
    }


def summary(document: dict[str, Any]) -> list[str]:
    """The last words of a run: five lines when it went well, all there is to know when it failed."""
    run = document["run"]
    if document["failure"] is not None and run["status"] == "failed":
        return _failed(document)
    progress = document["progress"]
    attempts = document["attempts"]
    resumes = sum(1 for entry in attempts if entry["restored_step"] is not None)
    head = [f"{run['name']} {run['status']}"]
    if progress["last_step"] is not None:
        total = f" of {progress['total_steps']}" if progress["total_steps"] else ""
        head.append(f"step {progress['last_step']}{total}")
    head.append(f"{format_duration(run['seconds'])}, {_count(resumes, 'resume')}")
    learnt = []
    if isinstance(progress["final_loss"], float):
        learnt.append(f"loss {progress['final_loss']:.4f}")
    if progress["validation_loss"] is not None:
        beside = progress["unigram_entropy"]
        words = f" (unigram entropy {beside:.4f})" if isinstance(beside, float) else ""
        learnt.append(f"validation loss {progress['validation_loss']:.4f}{words}")
    if progress["tokens_per_s"]:
        learnt.append(f"{progress['tokens_per_s']:,.0f} tokens/s")
    durable = progress["last_durable_step"]
    stalls = [entry["call_s"] for entry in document["checkpoints"] if entry["call_s"]]
    saved = f"newest durable checkpoint: step {durable}" if durable is not None else "no durable checkpoint"
    if stalls:
        saved += f"; {_count(len(stalls), 'save')}, {format_duration(sum(stalls) / len(stalls))} a call"
    lines = [
        " · ".join(head),
        f"  learnt   {' · '.join(learnt) or 'the script told no losses'}",
        f"  saved    {saved}",
    ]
    if run["note"]:
        lines.append(f"  note     {run['note']}")
    lines.append(f"  report   {run['path']}/report.html")
    if run["status"] == "finished":
        lines.append(
            f"  next     serai show {run['name']}   serai ckpt ls {run['name']}   serai ckpt verify {run['name']}"
        )
    else:
        lines.append(f"  next     {run['command']}   (resumes)   serai show {run['name']}")
    return lines


def _failed(document: dict[str, Any]) -> list[str]:
    run, progress, failure = document["run"], document["progress"], document["failure"]
    rank = f"rank {failure['rank']} on {failure['host']}" if failure["rank"] is not None else failure["host"]
    lines = [
        f"[{failure['code']}] {run['name']} failed: {failure['words']} ({failure['cause']})",
        f"  first     {rank}, attempt {failure['attempt']}: {failure['message']}",
    ]
    if run["note"]:
        lines.append(f"  gave up   {run['note']}")
    if failure["traceback"]:
        lines += [f"    {line}" for line in failure["traceback"].splitlines()]
    step, durable = progress["last_step"], progress["last_durable_step"]
    lines += [
        f"  last      step {step if step is not None else 'none'}, "
        f"newest durable checkpoint: {f'step {durable}' if durable is not None else 'none'}",
        f"  logs      {failure['log']}",
        f"  report    {run['path']}/report.html",
        f"  next      {failure['advice']}; then: {run['command']}   (serai explain {failure['code']})",
    ]
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

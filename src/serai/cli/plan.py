"""``serai plan``: what fits, how fast, how sure, what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serai.cli.session import Session, command
from serai.errors import SpecError

if TYPE_CHECKING:
    from serai.plan import Cluster, Layout, Model, Prediction, SearchResult

__all__ = ["main"]


@command
def main(
    session: Session,
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODEL|JOB", help="A model name (llama3-70b), a config.json, or a job file."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="KIND", help="Machine kind or GPU, such as nd-h100-v5 or h100-80gb."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="How many nodes.")] = 1,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="layout.tp=8, cluster.inter_node_gbps=800, model.layers=40 (layout. may be left out); may be repeated.",
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Search the layouts (also when no layout is given).")
    ] = False,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Global batch of the search, in sequences.")
    ] = None,
    tokens: Annotated[
        float, typer.Option("--tokens", metavar="N", help="Tokens to train, for time and cost.")
    ] = 300e9,
    explain: Annotated[
        bool, typer.Option("--explain", help="Every term of time and memory with its formula.")
    ] = False,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="NAME|FILE", help="Calibration profile.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained report.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Error table against published rows (of --published, or the own table)."
        ),
    ] = False,
    published: Annotated[
        Path | None,
        typer.Option("--published", metavar="FOLDER", help="Folder of published rows for --check."),
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            "--calibrate",
            metavar="RUN",
            help="Refit three constants from the steps of runs; may be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Where --calibrate writes; profile.toml of the workspace if not given.",
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="The models, machines and profiles it knows.")
    ] = False,
) -> None:
    """Predict memory, speed, cost and goodput; search layouts."""
    if list_:
        _list(session)
        return
    if check:
        _check(session, published)
        return
    if calibrate:
        _calibrate(session, calibrate, on, profile, out or session.workspace / "profile.toml")
        return
    if target is None:
        raise SpecError(
            "no model was given",
            code="S146",
            where="serai plan",
            expected="a model name, a config.json or a job file",
            next_step="serai plan llama3-8b --on h100-80gb",
        )
    from serai.plan import predict
    from serai.plan import search as run_search

    model, cluster, layout, given = _inputs(target, on, nodes, overrides or [])
    own = session.workspace / "profile.toml"
    if profile is None and cluster.name == "this-host" and own.is_file():
        profile = str(own)
    found: SearchResult | None = None
    if search or not given:
        found = run_search(
            model,
            cluster,
            global_batch=batch,
            seq_len=layout.seq_len,
            precision=layout.precision,
            profile=profile,
        )
        if not found.best:
            best = min((loser.prediction for loser in found.losers), key=lambda p: p.memory_gb)
        else:
            best = found.best[0]
    else:
        best = predict(model, cluster, layout, profile=profile)
    if html is not None:
        from serai.plan.report import render

        html.write_text(render(best, found=found, tokens=tokens), encoding="utf-8")
        session.note(f"wrote {html}")
    session.emit(_document(best, found, tokens), lambda: _text(session, best, found, tokens, explain))


# -- what is asked --------------------------------------------------------------------------------------------


def _inputs(
    target: str, on: str | None, nodes: int, overrides: list[str]
) -> tuple[Model, Cluster, Layout, bool]:
    """(model, cluster, layout, whether a layout was given)."""
    from serai.plan import Cluster, Layout
    from serai.plan.named import named_model

    changes: dict[str, dict[str, Any]] = {"model": {}, "cluster": {}, "layout": {}}
    for text in overrides:
        room, name, value = _override(text)
        changes[room][name] = value
    document = _job(target)
    if document is None:
        model = named_model(target)
        if on is None:
            raise SpecError(
                "no machine was given",
                code="S146",
                where="serai plan --on",
                expected="a machine kind or a GPU",
                next_step=f"serai plan {target} --on h100-80gb",
            )
        seq = {"vit": 197, "bert": 512}.get(model.arch, 2048)
        layout = Layout(seq_len=seq)
        count = changes["cluster"].pop("gpus_per_node", None)
        cluster = Cluster.named(on, nodes, count, **changes["cluster"])
        given = bool(set(changes["layout"]) - {"seq_len", "precision"})
    else:
        from serai.plan.feedback import job_cluster, job_layout, job_model

        model = job_model(*_job_shape(document))
        layout = job_layout(document)
        cluster = job_cluster(document, on).replace(**changes["cluster"])
        given = True
    return model.replace(**changes["model"]), cluster, layout.replace(**changes["layout"]), given


def _job(target: str) -> dict[str, Any] | None:
    """The resolved job document, if ``target`` is a job file."""
    if not target.endswith((".yaml", ".yml")):
        return None
    from serai.spec import resolve

    document = resolve(target).to_json()
    if document.get("script"):
        raise SpecError(
            f"{target} runs a script: its model is not written in the job file",
            code="S146",
            where=target,
            expected="a native job, a model name or a config.json",
            next_step="serai plan MODEL --on KIND",
        )
    return document


def _job_shape(document: dict[str, Any]) -> tuple[dict[str, Any], int]:
    from dataclasses import asdict

    from serai.train.config import ModelConfig

    shape = asdict(ModelConfig.model_validate(document.get("model") or {}).shape())
    vocabulary = ((document.get("data") or {}).get("tokenizer") or {}).get("vocab_size", 4096)
    return {**shape, "name": str(document.get("name", ""))}, int(vocabulary)


def _override(text: str) -> tuple[str, str, Any]:
    """``layout.tp=8`` → ("layout", "tp", 8), typed by the field."""
    from serai.plan import Cluster, Layout, Model

    rooms: dict[str, Any] = {"model": Model, "cluster": Cluster, "layout": Layout}
    key, equals, value = text.partition("=")
    room, dot, name = key.strip().partition(".")
    if not dot:
        room, name = "layout", room
    fields = sorted(rooms[room].__dataclass_fields__) if room in rooms else []
    if not equals or name not in fields:
        import difflib

        near = difflib.get_close_matches(name, fields, n=3, cutoff=0.4)
        raise SpecError(
            f"--set {text} sets nothing that a plan has",
            code="S146",
            where=f"--set {text}",
            expected=f"{room}." + "{" + ", ".join(fields) + "}"
            if fields
            else "layout.…, cluster.… or model.…",
            next_step=f"perhaps you meant {', '.join(near)}" if near else None,
        )
    plain = value.strip()
    return room, name, None if plain == "none" and name != "recompute" else _value(plain)


def _value(text: str) -> Any:
    if text.lower() == "null":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# -- what is said ---------------------------------------------------------------------------------------------


def _prediction(p: Prediction) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "model": p.model.name or p.model.arch,
        "parameters": p.model.params,
        "cluster": {"name": p.cluster.name, "nodes": p.cluster.nodes, "gpus": p.cluster.gpus, "gpu": p.cluster.gpu.name},
        "layout": {**asdict(p.layout), "zero": p.zero, "data_parallel": p.data_parallel},
        "fits": p.fits,
        "step_time_s": p.step_time_s,
        "step_time_interval_s": list(p.step_time_interval_s),
        "tokens_per_s": p.tokens_per_s,
        "tokens_per_s_per_gpu": p.tokens_per_s_per_gpu,
        "memory_gb": p.memory_gb,
        "memory_by_class": dict(p.memory_by_class),
        "mfu": p.mfu,
        "hfu": p.hfu,
        "tflops_per_gpu": p.tflops_per_gpu,
        "flops_formula": p.flops_formula,
        "terms": [asdict(term) for term in p.terms],
        "warnings": list(p.warnings),
        "profile": p.profile,
    }  # fmt: skip


def _document(best: Prediction, found: SearchResult | None, tokens: float) -> dict[str, Any]:
    from serai.plan import sensitivity
    from serai.plan.report import budget

    document: dict[str, Any] = {
        "prediction": _prediction(best),
        "budget": budget(best, tokens=tokens),
        "sensitivity": sensitivity(best.model, best.cluster, best.layout, profile=best.calibration),
    }
    if found is not None:
        document["search"] = {
            "considered": found.considered,
            "seconds": found.seconds,
            "global_batch": found.global_batch,
            "best": [_prediction(p) for p in found.best],
            "losers": [
                {"layout": _prediction(x.prediction)["layout"], "reason": x.reason} for x in found.losers
            ],
        }
    return document


def _text(session: Session, p: Prediction, found: SearchResult | None, tokens: float, explain: bool) -> str:
    from serai.plan import sensitivity
    from serai.plan.report import budget, layout_text
    from serai.units import format_bytes, format_duration

    low, high = p.step_time_interval_s
    b = budget(p, tokens=tokens)
    fits = session.style("fits", "green") if p.fits else session.style("does not fit", "red")
    money = "no price known" if b["dollars"] is None else f"${b['dollars']:,.0f} at ${b['dollars_per_gpu_hour']:.2f} a GPU-hour (list price)"  # fmt: skip
    gains = sensitivity(p.model, p.cluster, p.layout, profile=p.calibration)
    top = sorted(gains.items(), key=lambda item: -item[1])[:3]
    rows = [
        ("layout", layout_text(p)),
        ("memory", f"{fits}: {p.memory_gb:.1f} of {p.cluster.memory_gb:.4g} GB a GPU"),
        ("step", f"{format_duration(p.step_time_s)}  (80 %: {format_duration(low)} to {format_duration(high)})"),
        ("speed", f"{p.tokens_per_s:,.0f} tokens/s, {p.tokens_per_s_per_gpu:,.0f} a GPU"),
        ("use", f"MFU {p.mfu:.1%}, HFU {p.hfu:.1%}; {p.tflops_per_gpu:.0f} model TFLOPs a GPU"),
        ("training", f"{b['tokens']:.3g} tokens in {b['seconds'] / 86400:.1f} days, {b['gpu_hours']:,.0f} GPU-hours, {money}"),
        ("goodput", f"{b['goodput']:.1%} with {b['failures']:.1f} failures in {b['failure_days']:.0f} days, a save every {format_duration(b['save_interval_s'])}"),
        ("checkpoint", f"{format_bytes(b['checkpoint_bytes'])}, {format_bytes(b['checkpoint_bytes_per_node'])} a node"),
        ("twice", ", ".join(f"{name} {gain:+.1%}" for name, gain in top)),
        ("profile", p.profile),
    ]  # fmt: skip
    rows += [("warning", session.style(text, "yellow")) for text in p.warnings]
    head = f"{p.model.name or p.model.arch} ({p.model.params / 1e9:.3g} B parameters) on {p.cluster.gpus} × {p.cluster.gpu.name}"
    lines = [session.style(head, "bold")] + [f"  {title:<11} {text}" for title, text in rows]
    if explain:
        lines += ["", session.style("terms", "bold")]
        for t in p.terms:
            value = format_duration(t.value) if t.kind == "time" else f"{t.value:.2f} GB"
            whole = p.step_time_s if t.kind == "time" else p.memory_gb
            lines.append(f"  {t.kind:<7} {t.name:<31} {value:>10} {t.value / whole:>6.1%}  {t.formula}")
        lines.append(f"  TFLOPs  {p.flops_formula}")
    if found is not None:
        lines += ["", session.style(f"layouts: {found.considered:,} considered in {found.seconds:.1f} s, global batch {found.global_batch}", "bold")]  # fmt: skip
        lines += [f"  {format_duration(x.step_time_s):>8}  {x.tokens_per_s:>12,.0f} tokens/s  {x.memory_gb:6.1f} GB  MFU {x.mfu:5.1%}  {layout_text(x)}" for x in found.best]  # fmt: skip
        lines += [f"  lost: {layout_text(x.prediction)}: {x.reason}" for x in found.losers[:8]]
    return "\n".join(lines)


# -- the other questions ----------------------------------------------------------------------------------------


def _list(session: Session) -> None:
    from serai.plan.machines import MACHINES
    from serai.plan.named import MODELS
    from serai.plan.profiles import profile_names

    document = {
        "models": {name: model.params for name, model in MODELS.items()},
        "machines": {
            name: {"gpu": m.gpu, "gpus": m.gpus, "node_gbps": m.node_gbps, "note": m.note}
            for name, m in MACHINES.items()
        },
        "profiles": list(profile_names()),
    }

    def text() -> str:
        lines = ["models"] + [f"  {name:<18} {model.params / 1e9:9.3g} B" for name, model in MODELS.items()]
        lines += ["machines"] + [
            f"  {name:<22} {m.gpus} × {m.gpu:<16} {m.node_gbps:>6g} Gb/s a node  {m.note}"
            for name, m in MACHINES.items()
        ]
        return "\n".join([*lines, "profiles", *(f"  {name}" for name in profile_names())])

    session.emit(document, text)


def _check(session: Session, folder: Path | None) -> None:
    from serai.plan.check import check, render

    report = check(folder)
    session.emit({"check": report.to_json()}, lambda: render(report))


def _calibrate(session: Session, refs: list[str], on: str | None, base: str | None, out: Path) -> None:
    from serai.cli.runs import find_run
    from serai.events import read_events
    from serai.plan.calibrate import calibrate, calibrated_names, measured_from_events
    from serai.plan.feedback import job_cluster, job_layout, job_model
    from serai.plan.predict import predict
    from serai.plan.profiles import choose_profile, load_profile, write_profile

    runs = []
    for ref in refs:
        run = find_run(session, ref)
        document = run.resolved()
        runs.append(
            measured_from_events(
                read_events(run.rank_events(0)),
                job_model(*_job_shape(document)),
                job_cluster(document, on),
                job_layout(document),
            )
        )
    start = load_profile(base or choose_profile(runs[0].cluster, runs[0].layout))
    profile = calibrate(runs, start, name=f"{runs[0].cluster.name}/{out.stem}")
    write_profile(profile, out)
    rows = [
        {
            "run": ref,
            "measured_step_s": run.step_time_s,
            "before_s": predict(run.model, run.cluster, run.layout, profile=start).step_time_s,
            "after_s": predict(run.model, run.cluster, run.layout, profile=profile).step_time_s,
        }
        for ref, run in zip(refs, runs, strict=True)
    ]
    names = calibrated_names(runs)
    constants = {name: [getattr(start.constants, name), getattr(profile.constants, name)] for name in names}

    def text() -> str:
        from serai.units import format_duration

        lines = [
            f"{row['run']}: measured {format_duration(float(row['measured_step_s']))}, predicted {format_duration(float(row['before_s']))} before, {format_duration(float(row['after_s']))} after"  # type: ignore[arg-type]
            for row in rows
        ]
        lines += [f"  {name}: {before:.4g} → {after:.4g}" for name, (before, after) in constants.items()]
        return "\n".join([*lines, f"wrote {out}; use it with --profile {out}"])

    session.emit({"profile": str(out), "constants": constants, "runs": rows}, text)

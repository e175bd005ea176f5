"""``serai bench checkpoint``: what a save costs training, against the peers, in one run on the same state."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import serai
from serai.bench.peers import PEERS, Peer, Serai, make_peer
from serai.checkpoint.memory import usable_cores
from serai.checkpoint.planning import fingerprint
from serai.checkpoint.state import flatten
from serai.units import format_bytes

__all__ = ["Report", "Row", "run", "to_markdown"]

_TENSOR_BYTES = 64 << 20


@dataclass
class Row:
    """One peer. Seconds are medians over the rounds; ``inflation`` is a ratio of step times minus 1."""

    name: str
    blocked: float | None = None
    durable: float | None = None
    inflation: float | None = None
    restore: float | None = None
    note: str = ""


@dataclass
class Report:
    """All of one run. ``warm_copy`` is one copy of the same bytes into memory that was touched before, seconds."""

    bytes: int
    rounds: int
    threads: int
    warm_copy: float
    machine: str
    torch: str
    when: str
    rows: list[Row] = field(default_factory=list)
    restore_memory: float | None = None
    plan_5000_tensors: float | None = None
    resident_growth_bytes: int | None = None
    load_average: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, "benchmark": "checkpoint", **asdict(self)}


Say = Callable[[str], None]


def run(
    *, size: int, rounds: int, folder: Path, peers: list[str] | None = None, say: Say = lambda _: None
) -> Report:
    """Measure. Needs about three times ``size`` of memory and of disk in ``folder``.

    Peers take turns round by round, so that a noisy machine is noisy for all of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-") as name, _process_group():
        root = Path(name)
        state = _state(size)
        total = sum(tensor.nbytes for tensor in state["tensors"].values())
        report = Report(
            bytes=total,
            rounds=rounds,
            threads=torch.get_num_threads(),
            warm_copy=_warm_copy(state, rounds),
            machine=_machine(),
            torch=str(torch.__version__),
            when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            load_average=os.getloadavg()[0],
        )
        chosen = _make(peers or list(PEERS), root, state, report, say)
        _rounds(chosen, report, rounds, say)
        _restores(chosen, report, root, say)
        for peer, _ in chosen.values():
            peer.close()
        say("resident memory over 100 saves")
        report.resident_growth_bytes = _resident_growth(root / "flat")
        report.plan_5000_tensors = _plan_time()
        return report


def to_markdown(report: Report) -> str:
    """The table, with ratios to serai's own figures and how it was measured."""
    own = next((row for row in report.rows if row.name == "serai"), Row("serai"))
    lines = [
        f"# Checkpoint benchmark: {format_bytes(report.bytes)} of CPU state",
        "",
        f"{report.when} · {report.machine} · torch {report.torch} · {report.threads} torch thread(s) · "
        f"median of {report.rounds} rounds, peers in turn · load average at the start {report.load_average:.1f}",
        "",
        "`blocked` is the time inside the call that saves; `durable` until every file is flushed to the disk; "
        "`step inflation` how much longer training steps take while the save is under way; `restore` reads the "
        "save back from the disk (page cache dropped where the user may), serai's with every byte verified.",
        "",
        "| way | blocked | × serai | durable | × serai | step inflation | restore from disk | × serai |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report.rows:
        if row.blocked is None:
            lines.append(f"| {row.name} | – | – | – | – | – | – | {row.note} |")
            continue
        lines.append(
            f"| {row.name} | {_ms(row.blocked)} | {_ratio(row.blocked, own.blocked)} | {_ms(row.durable)} | "
            f"{_ratio(row.durable, own.durable)} | {_percent(row.inflation)} | {_ms(row.restore)} | "
            f"{_ratio(row.restore, own.restore)} |"
        )
    lines += ["", f"- One warm copy of the same bytes: {_ms(report.warm_copy)}"]
    if own.blocked is not None:
        lines.append(f"- serai blocks {own.blocked / report.warm_copy:.2f} × one warm copy")
    if report.restore_memory is not None:
        speed = report.warm_copy / report.restore_memory
        lines.append(
            f"- serai restores from memory, verified, in {_ms(report.restore_memory)} ({speed:.0%} of copy bandwidth)"
        )
    if report.plan_5000_tensors is not None:
        lines.append(
            f"- Planning a save of 5,000 tensors in the steady state: {_ms(report.plan_5000_tensors)}"
        )
    if report.resident_growth_bytes is not None:
        lines.append(f"- Resident memory after 100 saves: {report.resident_growth_bytes / 2**20:+.1f} MiB")
    return "\n".join(lines) + "\n"


def _ms(seconds: float | None) -> str:
    return (
        "–"
        if seconds is None
        else f"{seconds * 1e3:,.0f} ms"
        if seconds >= 0.01
        else f"{seconds * 1e3:.1f} ms"
    )


def _ratio(value: float | None, own: float | None) -> str:
    return "–" if value is None or not own else f"{value / own:.1f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.0%}"


def _state(size: int) -> dict[str, Any]:
    """Tensors of 64 MiB (smaller for small sizes), touched."""
    each = min(_TENSOR_BYTES, max(4096, size // 8))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for number in range(max(1, size // each)):
        tensors[f"weight.{number}"] = torch.rand(each // 4, generator=generator)
    return {"tensors": tensors}


def _warm_copy(state: dict[str, Any], rounds: int) -> float:
    """One copy of all bytes, by as many threads as serai may use, into memory that was written before."""
    from serai.checkpoint.memory import copy_spans

    sources = list(state["tensors"].values())
    targets = [torch.empty_like(tensor).fill_(1) for tensor in sources]
    spans = [(t.data_ptr(), s.data_ptr(), s.nbytes) for t, s in zip(targets, sources, strict=True)]
    from concurrent.futures import ThreadPoolExecutor

    threads = usable_cores()
    with ThreadPoolExecutor(threads) as pool:
        times = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            copy_spans(spans, pool, threads)
            times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _make(
    names: list[str], root: Path, state: dict[str, Any], report: Report, say: Say
) -> dict[str, tuple[Peer, Row]]:
    chosen: dict[str, tuple[Peer, Row]] = {}
    for name in names:
        maker = make_peer(name)
        row = Row(name)
        report.rows.append(row)
        if isinstance(maker, str):
            row.note = maker
            continue
        folder = root / name.replace(" ", "-").replace("(", "").replace(")", "")
        folder.mkdir()
        try:
            peer = maker(folder, state)
            if isinstance(peer, Serai):
                say("serai: pre-faulting slots, as the first training steps would let it")
                peer.warm_up()
            # The first save of every way pays for its own warm-up and is not counted.
            peer.save(0)
            peer.finish()
        except Exception as error:
            row.note = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
            continue
        chosen[name] = (peer, row)
    return chosen


def _rounds(chosen: dict[str, tuple[Peer, Row]], report: Report, rounds: int, say: Say) -> None:
    blocked: dict[str, list[float]] = {name: [] for name in chosen}
    durable: dict[str, list[float]] = {name: [] for name in chosen}
    inflation: dict[str, list[float]] = {name: [] for name in chosen}
    for number in range(1, rounds + 1):
        for name, (peer, _) in chosen.items():
            say(f"round {number}/{rounds}: {name}")
            os.sync()
            began = time.perf_counter()
            peer.save(2 * number)
            blocked[name].append(time.perf_counter() - began)
            peer.finish()
            durable[name].append(time.perf_counter() - began)
            inflation[name].append(_inflation(peer, 2 * number + 1))
    for name, (_, row) in chosen.items():
        row.blocked = statistics.median(blocked[name])
        row.durable = statistics.median(durable[name])
        row.inflation = statistics.median(inflation[name])


def _inflation(peer: Peer, step: int, seconds: float = 1.5) -> float:
    """How much longer a fixed piece of training takes right after the save call than with nothing under way."""
    a = torch.rand(384, 384)

    def work() -> float:
        began = time.perf_counter()
        for _ in range(20):
            torch.mm(a, a)
        return time.perf_counter() - began

    os.sync()
    quiet = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        quiet.append(work())
    peer.save(step)
    busy = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        busy.append(work())
    peer.finish()
    return statistics.fmean(busy) / statistics.fmean(quiet) - 1


def _restores(chosen: dict[str, tuple[Peer, Row]], report: Report, root: Path, say: Say) -> None:
    for name, (peer, row) in chosen.items():
        say(f"restore: {name}")
        if isinstance(peer, Serai):
            peer.load()
            report.restore_memory = min(_timed(peer.load) for _ in range(3))
            continue
        row.restore = _cold(peer.load)
    entry = chosen.get("serai")
    if entry is not None:
        peer, row = entry
        row.restore = _cold(lambda: _restore_from_disk(peer.folder, peer.state))


def _restore_from_disk(folder: Path, state: dict[str, Any]) -> None:
    """As after the loss of the node: no agent holds anything."""
    from concurrent.futures import ThreadPoolExecutor

    from serai.checkpoint.ranks import Ranks
    from serai.checkpoint.restore import restore
    from serai.storage.registry import open_storage

    threads = usable_cores()
    with ThreadPoolExecutor(threads) as pool:
        result = restore(
            state,
            ranks=Ranks(),
            agent=None,
            storages=[("durable", open_storage(folder))],
            step=None,
            strict=True,
            pool=pool,
        )
    assert result is not None


def _cold(act: Callable[[], Any], rounds: int = 3) -> float:
    times = []
    for _ in range(rounds):
        _drop_page_cache()
        times.append(_timed(act))
    return statistics.median(times)


def _timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _drop_page_cache() -> None:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        pass


def _resident_growth(folder: Path) -> int:
    """Bytes by which this process has grown from the 10th to the 110th save of 16 MiB."""
    state = {"w": torch.rand(4 << 20)}
    folder.mkdir()
    page = resource.getpagesize()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    with serai.Checkpointer(folder) as checkpointer:
        for step in range(110):
            if step == 10:
                before = resident()
            checkpointer.save(step, state).wait()
        grown = resident() - before
    shutil.rmtree(folder)
    return grown


def _plan_time() -> float:
    """Seconds a save spends on finding 5,000 tensors and recognising their plan."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(4)) for _ in range(1250)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.zeros(4)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    fingerprint(flatten(state).leaves)
    return min(_timed(lambda: fingerprint(flatten(state).leaves)) for _ in range(5))


@contextmanager
def _process_group() -> Iterator[None]:
    """A group of one: DCP's ``async_save`` asks for one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=120),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def _machine() -> str:
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{model}, {usable_cores()} cores, {memory / 2**30:.0f} GiB"


def write(report: Report, folder: Path) -> Path:
    """Put the table, the figures and the plot below ``folder``; the table's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
    (folder / "checkpoint.svg").write_text(plot(report))
    path = folder / "checkpoint.md"
    path.write_text(to_markdown(report))
    return path


def plot(report: Report) -> str:
    """Bars of the time that training waits and of the time until the bytes are on disk, as one SVG."""
    rows = [row for row in report.rows if row.blocked is not None and row.durable is not None]
    longest = max((row.durable or 0 for row in rows), default=1.0)
    height = 46 * len(rows) + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {height}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="12" y="22" font-size="15">{format_bytes(report.bytes)}: training waits (dark), '
        "bytes are on disk (light), seconds</text>",
    ]
    for number, row in enumerate(rows):
        top = 40 + 46 * number
        for value, colour, lift in ((row.durable or 0, "#a9c7e8", 0), (row.blocked or 0, "#1d5fa8", 16)):
            width = max(1.5, 480 * value / longest)
            parts.append(f'<rect x="220" y="{top + lift}" width="{width:.1f}" height="14" fill="{colour}"/>')
            parts.append(f'<text x="{226 + width:.1f}" y="{top + lift + 12}">{value:.2f}</text>')
        parts.append(f'<text x="12" y="{top + 19}">{row.name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"

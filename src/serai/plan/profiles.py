"""Calibration profiles: fitted constants and residuals, keyed by (cluster, software). TOML files beside this one."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, hypot, log2
from pathlib import Path
from typing import Any

from serai.errors import SpecError
from serai.plan.cluster import Cluster
from serai.plan.constants import Constants
from serai.plan.layout import Layout
from serai.plan.memory import MemoryConstants
from serai.plan.model import Model

__all__ = [
    "Profile",
    "choose_profile",
    "coordinates",
    "load_profile",
    "profile_names",
    "read_profile",
    "write_profile",
]

_FOLDER = Path(__file__).with_name("profiles")
DEFAULT = "default"


@dataclass(frozen=True)
class Profile:
    """Constants with what they were fitted on.

    ``spread`` is the half-width of the 80 % interval in log(time) for rows like the fitted ones, ``between``
    the same for another team's software on the same hardware (left-one-source-out residuals), ``widen``
    what one doubling outside the hull adds. ``hull`` maps a coordinate to its (lowest, highest) value.
    """

    name: str
    constants: Constants = field(default_factory=Constants)
    memory: MemoryConstants = field(default_factory=MemoryConstants)
    spread: float = 0.30
    between: float = 0.30
    widen: float = 0.08
    rows: int = 0
    hull: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    sources: tuple[str, ...] = ()
    measured: bool = False
    points: tuple[tuple[float, ...], ...] = field(default=(), hash=False)
    generations: tuple[str, ...] = ()

    def half_width(self, point: Mapping[str, float], generation: str, *, named: bool) -> float:
        """Half-width of the 80 % interval in log(time) at ``point``.

        At a calibrated point the profile's own residuals count, and a floor for unnamed software; away from
        every calibrated point (in doublings) it rises to what another team's software was found to differ by;
        outside the hull ``widen`` a doubling more; on another GPU generation a quarter more.
        """
        place = tuple(point[name] for name in COORDINATES)
        near = min(
            (sum((a - b) ** 2 for a, b in zip(place, p, strict=True)) for p in self.points), default=9.0
        )
        unfamiliar = 1.0 - exp(-near / (2 * _REACH**2))
        floor = 0.0 if named else _UNNAMED
        apart = floor + max(0.0, self.between - floor) * unfamiliar
        if self.generations and generation not in self.generations:
            apart = hypot(apart, 0.25)
        return min(
            _WIDEST, hypot(self.spread, apart, *(self.widen * x for x in self.outside(point).values()))
        )

    def outside(self, point: Mapping[str, float]) -> dict[str, float]:
        """How far (doublings) ``point`` lies outside the hull, by coordinate."""
        far: dict[str, float] = {}
        for name, (low, high) in self.hull.items():
            excess = max(low - point[name], point[name] - high, 0.0) if name in point else 0.0
            if excess > 0.01:
                far[name] = excess
        return far


#: The coordinates of ``points``, in their order.
COORDINATES = (
    "parameters", "hidden", "GPUs", "sequence", "tokens a micro-batch", "tensor parallel", "pipeline", "node network", "experts",
)  # fmt: skip
_REACH = 0.7  # doublings over which a residual is remembered
_WIDEST = 0.60  # nothing the catalogue holds has been found further off than that
_UNNAMED = 0.08  # two teams' software at the very same point


def coordinates(model: Model, cluster: Cluster, layout: Layout) -> dict[str, float]:
    """Where a prediction stands, in doublings (log2): what the hull is drawn over."""
    return {
        "parameters": log2(model.params),
        "hidden": log2(model.hidden),
        "GPUs": log2(cluster.gpus),
        "sequence": log2(layout.seq_len),
        "tokens a micro-batch": log2(layout.micro_batch * layout.seq_len / layout.cp),
        "tensor parallel": log2(layout.tp),
        "pipeline": log2(layout.pp),
        "node network": log2(cluster.inter_node_gbps) if cluster.nodes > 1 else log2(100.0),
        "experts": log2(max(1, model.experts)),
    }


def read_profile(path: Path) -> Profile:
    """One TOML file. Unknown constants are ignored (an older or newer file keeps loading)."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SpecError(
            f"the calibration profile does not read: {error}",
            code="S136",
            where=str(path),
            expected="a TOML file that serai plan --calibrate or serai doctor --profile wrote",
        ) from error
    return _profile(document)


def _profile(document: dict[str, Any]) -> Profile:
    known = set(Constants.names())
    residual = document.get("residuals", {})
    return Profile(
        name=document["name"],
        constants=Constants(**{k: float(v) for k, v in document.get("constants", {}).items() if k in known}),
        memory=MemoryConstants(
            **{
                k: float(v)
                for k, v in document.get("memory", {}).items()
                if k in MemoryConstants.__dataclass_fields__
            }
        ),
        spread=float(residual.get("spread", 0.3)),
        between=float(residual.get("between", 0.3)),
        widen=float(residual.get("widen", 0.08)),
        rows=int(residual.get("rows", 0)),
        hull={k: (float(v[0]), float(v[1])) for k, v in document.get("hull", {}).items()},
        sources=tuple(document.get("sources", ())),
        measured=bool(document.get("measured", False)),
        points=tuple(tuple(float(x) for x in p) for p in document.get("points", ())),
        generations=tuple(document.get("generations", ())),
    )


def write_profile(profile: Profile, path: Path) -> None:
    """The TOML that ``read_profile`` reads."""
    lines = [f'name = "{profile.name}"', f"sources = {list(profile.sources)}".replace("'", '"')]
    lines.append(f"generations = {list(profile.generations)}".replace("'", '"'))
    if profile.points:
        lines.append(f"# calibrated places: log2 of {', '.join(COORDINATES)}")
        lines += ["points = [", *(f"  [{', '.join(f'{x:g}' for x in p)}]," for p in profile.points), "]"]
    if profile.measured:
        lines.append("measured = true")
    lines += ["", "[constants]"]
    lines += [f"{name} = {value:.4g}" for name, value in profile.constants.as_dict().items()]
    lines += ["", "[memory]"]
    lines += [
        f"{name} = {getattr(profile.memory, name):.4g}" for name in MemoryConstants.__dataclass_fields__
    ]
    lines += ["", "[residuals]", f"rows = {profile.rows}"]
    lines += [f"{name} = {getattr(profile, name):.4f}" for name in ("spread", "between", "widen")]
    lines += ["", "[hull]", "# log2 of each coordinate, lowest and highest"]
    lines += [f'"{name}" = [{low:.3f}, {high:.3f}]' for name, (low, high) in profile.hull.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def profile_file(name: str) -> Path:
    return _FOLDER / (name.replace("/", "--") + ".toml")


@lru_cache(maxsize=1)
def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem.replace("--", "/") for path in _FOLDER.glob("*.toml")))


@lru_cache(maxsize=64)
def load_profile(name: str) -> Profile:
    """A profile of the package by name, or a file by path. Raises ``SpecError`` S136."""
    path = profile_file(name)
    if path.exists():
        return read_profile(path)
    if name.endswith(".toml"):
        return read_profile(Path(name))
    raise SpecError(
        f"no calibration profile is called {name!r}",
        code="S136",
        where="profile",
        expected="one of " + ", ".join(profile_names()) + ", or the path of a .toml file",
    )


def choose_profile(
    cluster: Cluster, layout: Layout, zero: int | None = None, available: Collection[str] | None = None
) -> str:
    """The profile that fits hardware and style of a prediction best; ``default`` where nothing is near.

    The style is read off the layout: sharded (ZeRO-2/3 or FSDP, no tensor or pipeline parallelism) or
    Megatron's. On Ampere fp16 with ZeRO-3 was DeepSpeed's, bf16 is FSDP's; DeepSpeed's Megatron trained
    with ZeRO-1 and full recomputation. ``available`` restricts the choice (leave-one-source-out).
    """
    have = set(profile_names()) if available is None else set(available)
    zero = layout.zero if zero is None else zero
    sharded = layout.tp == 1 and layout.pp == 1 and (zero or 0) >= 2
    slow = cluster.nodes == 1 or cluster.inter_node_gbps <= 800 or cluster.name == "ndm-a100-v4"
    deepspeed = (zero or 0) == 1 and layout.recompute == "full" and layout.tp > 1 and slow
    generation = cluster.gpu.generation
    if sharded:
        order = {
            "volta": ("v100/deepspeed-2022", "ndm-a100-v4/deepspeed-2022"),
            "ampere": ("a100/fsdp-2023", "h100/fsdp-2023", "ndm-a100-v4/deepspeed-2022"),
            "hopper": ("h100/fsdp-2023", "a100/fsdp-2023", "h100/jax-2025"),
            "blackwell": ("h100/fsdp-2023", "a100/fsdp-2023", "h100/jax-2025"),
        }.get(generation, ())
        if generation == "ampere" and layout.precision == "fp16":
            order = ("ndm-a100-v4/deepspeed-2022", "a100/fsdp-2023", "v100/deepspeed-2022")
    else:
        a100 = ("a100/megatron-2022", "a100/megatron-deepspeed-2022")
        order = {
            "ampere": a100[::-1] if deepspeed else a100,
            "hopper": ("h100/megatron-2025", "gb200/megatron-2025"),
            "blackwell": ("gb200/megatron-2025", "h100/megatron-2025"),
        }.get(generation, ())
        if deepspeed and cluster.name == "ndm-a100-v4":
            order = ("ndm-a100-v4/megatron-deepspeed-2022", *order)
    if cluster.memory_gb < 32 and generation != "volta":
        order = ()  # consumer and inference cards
    return next((name for name in order if name in have), DEFAULT)

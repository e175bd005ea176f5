"""Calibration profiles: fitted constants and residuals, keyed by (cluster, software). TOML files beside this one."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import log2
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
    widen: float = 0.05
    rows: int = 0
    hull: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    sources: tuple[str, ...] = ()
    measured: bool = False

    def outside(self, point: Mapping[str, float]) -> dict[str, float]:
        """How far (doublings) ``point`` lies outside the hull, by coordinate."""
        far: dict[str, float] = {}
        for name, (low, high) in self.hull.items():
            excess = max(low - point[name], point[name] - high, 0.0) if name in point else 0.0
            if excess > 0.01:
                far[name] = excess
        return far


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
        widen=float(residual.get("widen", 0.05)),
        rows=int(residual.get("rows", 0)),
        hull={k: (float(v[0]), float(v[1])) for k, v in document.get("hull", {}).items()},
        sources=tuple(document.get("sources", ())),
        measured=bool(document.get("measured", False)),
    )


def write_profile(profile: Profile, path: Path) -> None:
    """The TOML that ``read_profile`` reads."""
    lines = [f'name = "{profile.name}"', f"sources = {list(profile.sources)}".replace("'", '"')]
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


def profile_names() -> list[str]:
    return sorted(path.stem.replace("--", "/") for path in _FOLDER.glob("*.toml"))


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


def choose_profile(cluster: Cluster, layout: Layout, zero: int | None = None) -> str:
    """The profile that fits hardware and style of a prediction best; ``default`` where nothing was measured.

    The style is read off the layout: sharded (ZeRO-2/3 or FSDP, no tensor or pipeline parallelism) or
    Megatron's. On Ampere fp16 with ZeRO-3 was DeepSpeed's, bf16 is FSDP's.
    """
    zero = layout.zero if zero is None else zero
    sharded = layout.tp == 1 and layout.pp == 1 and (zero or 0) >= 2
    generation = cluster.gpu.generation
    fp16 = layout.precision == "fp16"
    name = DEFAULT
    if generation == "volta" and sharded:
        name = "v100/deepspeed-2022"
    elif generation == "ampere" and cluster.gpu.memory_gb >= 40:
        if sharded:
            name = "ndm-a100-v4/deepspeed-2022" if fp16 else "a100/fsdp-2023"
        elif (zero or 0) >= 1 and layout.recompute == "full":
            name = "a100/megatron-deepspeed-2022"
        else:
            name = "a100/megatron-2022"
    elif generation == "hopper":
        name = "h100/fsdp-2023" if sharded else "h100/megatron-2025"
    elif generation == "blackwell" and cluster.gpu.memory_gb >= 100 and not sharded:
        name = "gb200/megatron-2025"
    return name if profile_file(name).exists() else DEFAULT

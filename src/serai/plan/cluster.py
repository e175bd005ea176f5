"""A cluster: nodes of one kind, and what may be overridden about them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any

from serai.errors import SpecError
from serai.plan.machines import GPUS, MACHINES, Gpu

__all__ = ["Cluster"]


@dataclass(frozen=True)
class Cluster:
    """``nodes`` equal machines with ``gpus_per_node`` GPUs each.

    ``inter_node_gbps`` is Gb/s (10^9 bits) per node and direction; ``intra_node_gbps`` is GB/s (10^9 bytes)
    per GPU and direction; ``hbm_gbps``, ``pcie_gbps``, ``host_dram_gbps`` are GB/s; ``memory_gb`` is
    10^9 bytes per GPU, ``host_memory_gb`` per node. ``domain`` is how many GPUs share one NVLink fabric.
    """

    name: str
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    inter_node_gbps: float
    intra_node_gbps: float
    hbm_gbps: float
    memory_gb: float
    pcie_gbps: float
    host_memory_gb: float
    host_dram_gbps: float
    domain: int
    dollars_per_gpu_hour: float | None = None

    @classmethod
    def named(cls, name: str, nodes: int = 1, gpus_per_node: int | None = None, **overrides: Any) -> Cluster:
        """A catalogue entry, by machine kind or plain GPU name.

        ``gpus_per_node`` defaults to the kind's own number (8 for a plain GPU). Any field of ``Cluster``
        but ``gpu`` may be overridden by keyword. Raises ``SpecError`` S130 for an unknown name, S131 for
        an unknown or impossible override.
        """
        key = name.strip().lower().replace("_", "-").removeprefix("standard-")
        key = _ALIASES.get(key, key)
        machine = MACHINES.get(key)
        if machine is None:
            near = difflib.get_close_matches(key, MACHINES, n=3, cutoff=0.4)
            raise SpecError(
                f"no machine or GPU is called {name!r}",
                code="S130",
                where="cluster",
                expected="one of " + ", ".join(sorted(MACHINES)),
                next_step=f"perhaps you meant {', '.join(near)}" if near else "serai plan --list",
            )
        gpu = GPUS[machine.gpu]
        count = machine.gpus if gpus_per_node is None else gpus_per_node
        network = machine.node_gbps
        if gpu.domain > machine.gpus or key in ("gb200", "gb300"):
            network = machine.node_gbps / machine.gpus * count  # a tray brings one NIC for each GPU
        cluster = cls(
            name=key,
            nodes=nodes,
            gpus_per_node=count,
            gpu=gpu,
            inter_node_gbps=network,
            intra_node_gbps=gpu.link_gbps,
            hbm_gbps=gpu.hbm_gbps,
            memory_gb=round(gpu.memory_gb * _GIB * 0.99, 1),
            pcie_gbps=gpu.pcie_gbps
            / (2 if gpu.generation in _SHARED_UPLINK and count > 4 and gpu.domain > 1 else 1),
            host_memory_gb=machine.host_memory_gb,
            host_dram_gbps=machine.host_dram_gbps,
            domain=max(count, gpu.domain) if gpu.domain > 8 else count,
            dollars_per_gpu_hour=machine.dollars_per_gpu_hour or gpu.dollars_per_hour,
        )
        unknown = set(overrides) - (set(cls.__dataclass_fields__) - {"gpu", "name", "nodes", "gpus_per_node"})
        if unknown:
            raise SpecError(
                f"a cluster has no {', '.join(sorted(unknown))}",
                code="S131",
                where="cluster",
                expected=", ".join(sorted(set(cls.__dataclass_fields__) - {"gpu", "name"})),
            )
        return replace(cluster, **overrides) if overrides else cluster

    def __post_init__(self) -> None:
        for field in ("nodes", "gpus_per_node", "domain"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise SpecError(
                    f"{field} is {value!r}", code="S131", where="cluster", expected="a whole number ≥ 1"
                )
        for field, unit in _UNITS.items():
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _MOST:
                raise SpecError(
                    f"{field} is {value!r}",
                    code="S131",
                    where=f"cluster.{field}",
                    expected=f"a number in {unit}, above 0 and below {_MOST:,.0f}",
                )

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def node_bytes_per_s(self) -> float:
        """Network of one node and direction, bytes per second."""
        return self.inter_node_gbps * 1e9 / 8

    def replace(self, **changes: Any) -> Cluster:
        """The same cluster with some fields changed."""
        return replace(self, **changes)


_UNITS = {
    "inter_node_gbps": "Gb/s (10^9 bits) a node",
    "intra_node_gbps": "GB/s (10^9 bytes) a GPU",
    "hbm_gbps": "GB/s (10^9 bytes)",
    "memory_gb": "GB (10^9 bytes) a GPU",
    "pcie_gbps": "GB/s (10^9 bytes) a direction",
    "host_memory_gb": "GB (10^9 bytes) a node",
    "host_dram_gbps": "GB/s (10^9 bytes) a node",
}
_MOST = 1e6  # whoever writes bits or bytes instead of 10^9 of them lands above it

#: The number in a GPU's name counts GiB (2^30); the driver keeps about one per cent.
_GIB = 2**30 / 1e9

#: SXM boards of these generations put two GPUs behind one PCIe uplink to the host.
_SHARED_UPLINK = ("volta", "ampere")

_ALIASES = {
    "v100": "v100-32gb", "a100": "a100-80gb", "a800": "a800-80gb", "h100": "h100-80gb", "h100-sxm": "h100-80gb",
    "h200": "h200-141gb", "b200": "b200-180gb", "b300-270gb": "b300", "b300-288gb": "b300", "h800": "h800-80gb",
    "h20": "h20-96gb", "gb200-nvl72": "gb200", "gb300-nvl72": "gb300", "a100-sxm4-80gb": "a100-80gb",
    "nd96amsr-a100-v4": "ndm-a100-v4", "nd96asr-v4": "nd-a100-v4", "nd96isr-h100-v5": "nd-h100-v5",
    "nd96isr-h200-v5": "nd-h200-v5", "nd40rs": "nd40rs-v2", "p4d": "p4d.24xlarge", "p4de": "p4de.24xlarge",
    "p5": "p5.48xlarge", "rtx4090": "rtx-4090", "rtx3090": "rtx-3090", "rtx5090": "rtx-5090", "cpu": "cpu-epyc-64core",
}  # fmt: skip

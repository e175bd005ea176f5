"""The catalogue: what data sheets say about GPUs and machines. A literal table; nothing here is fitted.

Rates are the data sheet's: dense TFLOP/s (10^12 per second, no sparsity) by precision, HBM in GB/s (10^9),
NVLink in GB/s per GPU and direction, PCIe in GB/s per direction, node network in Gb/s (10^9 bits) per node.
``ceiling`` is what a plain matrix product was measured to reach of the sheet's bf16 or fp16 rate (public
"maximum achievable matmul" tables; 0.80 where nobody published one).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

__all__ = ["GPUS", "MACHINES", "Gpu", "Machine"]


@dataclass(frozen=True)
class Gpu:
    """One accelerator. ``tflops`` maps a precision family (``fp32``, ``half``, ``fp8``, ``fp4``) to its peak."""

    name: str
    generation: str
    memory_gb: float
    hbm_gbps: float
    tflops: dict[str, float] = field(hash=False)
    link_gbps: float
    pcie_gbps: float
    ceiling: float = 0.80
    ceiling_low: float = 0.74
    domain: int = 8
    dollars_per_hour: float | None = None

    def peak(self, family: str) -> float:
        """FLOP/s of ``family``; a missing one falls back to the next wider that the chip has."""
        for name in {"fp4": ("fp4", "fp8", "half"), "fp8": ("fp8", "half"), "half": ("half", "fp32")}.get(
            family, ("fp32", "half")
        ):
            if name in self.tflops:
                return self.tflops[name] * 1e12
        return next(iter(self.tflops.values())) * 1e12

    def faster(self, factor: float) -> Gpu:
        """The same chip with ``factor`` times the matrix rate."""
        return replace(self, tflops={family: rate * factor for family, rate in self.tflops.items()})


@dataclass(frozen=True)
class Machine:
    """One node kind: which GPU, how many, what joins the nodes, what the host has."""

    gpu: str
    gpus: int
    node_gbps: float
    host_memory_gb: float
    host_dram_gbps: float
    dollars_per_gpu_hour: float | None = None
    note: str = ""


def _gpu(
    name: str,
    generation: str,
    memory: float,
    hbm: float,
    half: float,
    link: float,
    pcie: float,
    *,
    fp8: float | None = None,
    fp4: float | None = None,
    fp32: float | None = None,
    ceiling: float = 0.80,
    low: float = 0.74,
    domain: int = 8,
    dollars: float | None = None,
) -> Gpu:
    rates = {"half": half, "fp8": fp8, "fp4": fp4, "fp32": fp32}
    tflops = {family: value for family, value in rates.items() if value is not None}
    return Gpu(name, generation, memory, hbm, tflops, link, pcie, ceiling, low, domain, dollars)


_GPUS = (
    _gpu("v100-16gb", "volta", 16, 900, 125, 150, 13, fp32=15.7, ceiling=0.80, dollars=3.06),
    _gpu("v100-32gb", "volta", 32, 900, 125, 150, 13, fp32=15.7, ceiling=0.80, dollars=3.06),
    _gpu("a100-40gb", "ampere", 40, 1555, 312, 300, 26, fp32=19.5, ceiling=0.869, dollars=3.40),
    _gpu("a100-80gb", "ampere", 80, 2039, 312, 300, 26, fp32=19.5, ceiling=0.869, dollars=4.10),
    _gpu("a100-pcie", "ampere", 80, 1935, 312, 26, 26, fp32=19.5, ceiling=0.811, dollars=3.67),
    _gpu("a800-80gb", "ampere", 80, 2039, 312, 200, 26, fp32=19.5, ceiling=0.869, dollars=3.40),
    _gpu("h100-80gb", "hopper", 80, 3350, 989, 450, 55, fp8=1979, fp32=67, ceiling=0.803, low=0.709, dollars=6.98),
    _gpu("h100-pcie", "hopper", 80, 2000, 756, 55, 55, fp8=1513, fp32=51, ceiling=0.75, low=0.70, dollars=5.0),
    _gpu("h800-80gb", "hopper", 80, 3350, 989, 200, 55, fp8=1979, fp32=67, ceiling=0.803, low=0.709, dollars=5.0),
    _gpu("h20-96gb", "hopper", 96, 4000, 148, 450, 55, fp8=296, fp32=44, ceiling=0.90, low=0.85, dollars=2.5),
    _gpu("h200-141gb", "hopper", 141, 4800, 989, 450, 55, fp8=1979, fp32=67, ceiling=0.803, low=0.734, dollars=7.9),
    _gpu("gh200", "hopper", 96, 4000, 989, 450, 200, fp8=1979, fp32=67, ceiling=0.838, low=0.776, dollars=6.5),
    _gpu("b200-180gb", "blackwell", 180, 7700, 2250, 900, 55, fp8=4500, fp4=9000, fp32=75, ceiling=0.776, low=0.763, dollars=10.0),
    _gpu("b300", "blackwell", 270, 7700, 2250, 900, 110, fp8=4500, fp4=13500, fp32=72, ceiling=0.786, low=0.745, dollars=12.0),
    _gpu("gb200", "blackwell", 186, 8000, 2450, 900, 200, fp8=4900, fp4=9800, fp32=80, ceiling=0.744, low=0.738, domain=72, dollars=10.5),
    _gpu("gb300", "blackwell", 279, 8000, 2450, 900, 200, fp8=4900, fp4=14700, fp32=80, ceiling=0.744, low=0.738, domain=72, dollars=12.5),
    _gpu("l40s", "ada", 48, 864, 362, 26, 26, fp8=733, fp32=91.6, ceiling=0.75, domain=1, dollars=1.9),
    _gpu("l4", "ada", 24, 300, 121, 26, 26, fp8=242, fp32=30, ceiling=0.55, domain=1, dollars=0.8),
    _gpu("a10g", "ampere", 24, 600, 70, 26, 26, fp32=35, ceiling=0.80, domain=1, dollars=1.2),
    _gpu("t4", "turing", 16, 320, 65, 13, 13, fp32=8.1, ceiling=0.45, domain=1, dollars=0.53),
    _gpu("rtx-3090", "ampere", 24, 936, 71, 26, 26, fp32=35.6, ceiling=0.90, domain=1),
    _gpu("rtx-4090", "ada", 24, 1008, 165, 26, 26, fp8=330, fp32=82.6, ceiling=0.95, domain=1),
    _gpu("rtx-5090", "blackwell", 32, 1792, 209, 55, 55, fp8=419, fp4=838, fp32=105, ceiling=0.95, domain=1),
    _gpu("mi250x", "cdna2", 128, 3277, 383, 250, 26, fp32=47.9, ceiling=0.55, dollars=2.5),
    _gpu("mi300x", "cdna3", 192, 5300, 1307, 448, 55, fp8=2615, fp32=163, ceiling=0.514, low=0.50, dollars=6.0),
    _gpu("mi325x", "cdna3", 256, 6000, 1307, 448, 55, fp8=2615, fp32=163, ceiling=0.604, low=0.55, dollars=7.0),
    _gpu("mi355x", "cdna4", 288, 8000, 2300, 538, 55, fp8=4600, fp4=9200, fp32=157, ceiling=0.68, low=0.65, dollars=9.0),
    _gpu("gaudi2", "gaudi", 96, 2450, 432, 262, 26, fp8=865, ceiling=0.969, low=0.90, dollars=1.6),
    _gpu("gaudi3", "gaudi", 128, 3700, 1677, 525, 55, fp8=1677, ceiling=0.741, low=0.741, dollars=3.0),
    # CPU hosts: one "GPU" is one process that owns `domain`'s share of the node; peak of AVX fp32 FMA.
    _gpu("cpu-epyc-64core", "cpu", 256, 200, 4.0, 50, 25, fp32=4.0, ceiling=0.60, domain=2, dollars=1.0),
    _gpu("cpu-xeon-32core", "cpu", 256, 200, 3.0, 50, 25, fp32=3.0, ceiling=0.60, domain=2, dollars=1.0),
    _gpu("cpu-laptop", "cpu", 16, 40, 0.4, 10, 10, fp32=0.4, ceiling=0.60, domain=1),
    _gpu("cpu-core", "cpu", 8, 12, 0.1, 6, 6, fp32=0.1, ceiling=0.60, domain=1),
)  # fmt: skip

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _GPUS}

#: Node network of a plain GPU's "typical node", Gb/s per node, and its host.
_TYPICAL: dict[str, tuple[float, float, float]] = {
    "volta": (100, 672, 200),
    "turing": (25, 200, 80),
    "ampere": (1600, 1900, 320),
    "hopper": (3200, 2000, 500),
    "blackwell": (3200, 2000, 600),
    "ada": (100, 512, 300),
    "cdna2": (800, 1000, 320),
    "cdna3": (3200, 2000, 600),
    "cdna4": (3200, 2000, 700),
    "gaudi": (2400, 1000, 400),
    "cpu": (25, 256, 200),
}


def _typical(gpu: Gpu) -> Machine:
    network, memory, dram = _TYPICAL[gpu.generation]
    if gpu.name in ("a10g", "rtx-3090", "rtx-5090"):
        network = 100
    return Machine(gpu.name, 8, network, memory, dram, gpu.dollars_per_hour, "typical node of this GPU")


MACHINES: dict[str, Machine] = {
    **{gpu.name: _typical(gpu) for gpu in _GPUS},
    # Azure
    "nc24rs-v3": Machine("v100-16gb", 4, 56, 448, 120, 3.06, "Azure, 1 x FDR InfiniBand"),
    "nd40rs-v2": Machine("v100-32gb", 8, 100, 672, 200, 2.75, "Azure, 1 x EDR InfiniBand"),
    "nd-a100-v4": Machine("a100-40gb", 8, 1600, 900, 320, 3.40, "Azure, 8 x HDR InfiniBand"),
    "ndm-a100-v4": Machine("a100-80gb", 8, 1600, 1900, 320, 4.10, "Azure, 8 x HDR InfiniBand"),
    "nd-h100-v5": Machine("h100-80gb", 8, 3200, 1900, 500, 12.29, "Azure, 8 x NDR InfiniBand"),
    "nd-h200-v5": Machine("h200-141gb", 8, 3200, 1900, 500, 10.60, "Azure, 8 x NDR InfiniBand"),
    "nd-gb200-v6": Machine("gb200", 4, 1600, 900, 800, 13.5, "Azure, NVL72, 4 x NDR a tray"),
    # DGX
    "dgx-1": Machine("v100-16gb", 8, 400, 512, 130, None, "4 x EDR InfiniBand"),
    "dgx-2": Machine("v100-32gb", 16, 800, 1500, 220, None, "16 GPUs on NVSwitch, 8 x EDR InfiniBand"),
    "dgx-a100": Machine("a100-80gb", 8, 1600, 2000, 320, None, "8 x HDR InfiniBand"),
    "dgx-h100": Machine("h100-80gb", 8, 3200, 2000, 500, None, "8 x NDR InfiniBand"),
    "dgx-h200": Machine("h200-141gb", 8, 3200, 2000, 500, None, "8 x NDR InfiniBand"),
    "dgx-b200": Machine("b200-180gb", 8, 3200, 2000, 600, None, "8 x NDR InfiniBand"),
    "dgx-b300": Machine("b300", 8, 6400, 2000, 600, None, "8 x XDR InfiniBand"),
    "dgx-gb200": Machine("gb200", 4, 1600, 900, 800, None, "NVL72 tray"),
    "dgx-gb300": Machine("gb300", 4, 3200, 900, 800, None, "NVL72 tray"),
    # other clouds
    "p3dn.24xlarge": Machine("v100-32gb", 8, 100, 768, 200, 3.90, "AWS EFA"),
    "p4d.24xlarge": Machine("a100-40gb", 8, 400, 1152, 280, 4.10, "AWS EFA"),
    "p4de.24xlarge": Machine("a100-80gb", 8, 400, 1152, 280, 5.12, "AWS EFA"),
    "p5.48xlarge": Machine("h100-80gb", 8, 3200, 2048, 500, 12.29, "AWS EFA"),
    "p5en.48xlarge": Machine("h200-141gb", 8, 3200, 2048, 500, 10.60, "AWS EFA"),
    "p6-b200.48xlarge": Machine("b200-180gb", 8, 3200, 2048, 600, 14.2, "AWS EFA"),
    "g5.48xlarge": Machine("a10g", 8, 100, 768, 280, 2.04, "AWS ENA"),
    "g6e.48xlarge": Machine("l40s", 8, 400, 1536, 300, 3.77, "AWS EFA"),
    "a2-highgpu-8g": Machine("a100-40gb", 8, 100, 680, 280, 3.67, "Google Cloud"),
    "a2-ultragpu-8g": Machine("a100-80gb", 8, 100, 1360, 280, 5.07, "Google Cloud"),
    "a3-highgpu-8g": Machine("h100-80gb", 8, 800, 1872, 500, 11.06, "Google Cloud"),
    "a3-megagpu-8g": Machine("h100-80gb", 8, 1600, 1872, 500, 11.5, "Google Cloud"),
    "a3-ultragpu-8g": Machine("h200-141gb", 8, 3200, 2952, 500, 10.8, "Google Cloud"),
    "a4-highgpu-8g": Machine("b200-180gb", 8, 3200, 3968, 600, 14.0, "Google Cloud"),
    "mi300x-node": Machine("mi300x", 8, 3200, 2300, 600, 6.0, "8 x 400 Gb/s"),
    # at home
    "workstation-rtx-4090": Machine("rtx-4090", 2, 10, 128, 80, None, "2 GPUs on PCIe"),
    "workstation-rtx-3090": Machine("rtx-3090", 2, 10, 128, 50, None, "2 GPUs on PCIe"),
    "laptop": Machine("cpu-laptop", 1, 1, 16, 40, None, "one CPU process"),
}  # fmt: skip

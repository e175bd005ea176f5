"""Published measurements as (model, cluster, layout) → step time, memory. Reads the column layout of
``published.csv`` (the project's own small table) and of any other file in the same columns.

What a row does not say is filled in here, in the open: see ``_ASSUMED`` and ``notes``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from serai.errors import SpecError
from serai.plan.cluster import Cluster
from serai.plan.layout import Layout
from serai.plan.model import Model

__all__ = ["Row", "own_table", "read_folder", "read_rows"]


@dataclass(frozen=True)
class Row:
    """One measurement. ``step_time_s`` in seconds, ``memory_gb`` in 10^9 bytes, either may be missing."""

    source: str
    label: str
    number: str
    model: Model
    cluster: Cluster
    layout: Layout
    profile: str | None
    step_time_s: float | None
    memory_gb: float | None
    memory_kind: str
    out_of_memory: bool
    assumed: tuple[str, ...] = ()
    headline: float | None = None  # hardware TFLOPs/GPU as announced
    url: str = ""

    @property
    def analytic_memory(self) -> bool:
        return "analytic" in self.memory_kind


_GPU = (
    ("V100-32GB (DGX-2)", "dgx-2"), ("V100-16GB", "v100-16gb"), ("V100-32GB", "v100-32gb"), ("A100-40GB", "a100-40gb"),
    ("A800", "a800-80gb"), ("A100-80GB", "a100-80gb"), ("H100-80GB", "h100-80gb"), ("H200", "h200-141gb"),
    ("GB200", "gb200"), ("GB300", "gb300"), ("B200", "b200-180gb"), ("B300", "b300"),
)  # fmt: skip

#: Shapes that a table names but does not print. (layers, hidden, heads): 12·L·h² ≈ the printed size.
_ASSUMED: dict[str, tuple[int, int, int]] = {
    "GPT-18B": (40, 6144, 48),
    "GPT-49B": (61, 8192, 64),
    "GPT-91B": (89, 9216, 72),
    "GPT-138B": (76, 12288, 96),
}


def own_table() -> Path:
    """The small table inside the package."""
    return Path(__file__).with_name("published.csv")


def read_folder(folder: Path) -> list[Row]:
    """Every row of every file in ``folder`` that has the columns. Raises ``SpecError`` S135 if there is none."""
    rows = [row for path in sorted(folder.glob("*.csv")) for row in read_rows(path)]
    if not rows:
        raise SpecError(
            f"no published rows in {folder}",
            code="S135",
            where=str(folder),
            expected="CSV files with a source_id column",
        )
    return rows


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of one file that name enough to be predicted; others are passed over."""
    with path.open(newline="", encoding="utf-8") as lines:
        for record in csv.DictReader(lines):
            if "source_id" in record and (row := _row(record)) is not None:
                yield row


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _whole(text: str | None, default: int = 0) -> int:
    value = _number(text)
    return int(value) if value is not None else default


def _network(record: dict[str, str], nodes: int, gpn: int) -> float | None:
    """Gb/s per node, where the row's text says it."""
    text = record["interconnect"]
    if ("unstated" in text and "class" not in text) or "Selene" in text or nodes == 1:
        return None
    for pattern, each in (
        (r"(\d+)\s*[x×]\s*(?:Omni-Path )?(\d+)\s*Gb/s", True),
        (r"(\d+)x Omni-Path (\d+)Gb/s", True),
        (r"(\d+)\s*Gb/s per GPU", False),
    ):
        if found := re.search(pattern, text):
            return float(found[1]) * float(found[2]) if each else float(found[1]) * gpn
    if found := re.search(r"(\d+)\s*Gb/s", text):
        return float(found[1])
    return None


def _shape(record: dict[str, str]) -> tuple[Model, list[str]] | None:
    assumed: list[str] = []
    text, arch = record["model"], record["arch"]
    vocab = _whole(record["vocab"], 50257)
    if "DeepSeek-V3" in text:
        return Model("moe", 61, 7168, 128, 128, 2048, 129280, experts=256, top_k=8, shared_experts=1, dense_layers=3, dense_ffn=18432, name=text), ["shape"]  # fmt: skip
    layers, hidden, heads = (_whole(record[name]) for name in ("layers", "hidden", "heads"))
    if not hidden and text in _ASSUMED:
        layers, hidden, heads = _ASSUMED[text]
        assumed.append("shape")
    if not hidden:
        return None
    params = _number(record["params"]) or 0.0
    if not layers:
        layers = max(1, round((params - vocab * hidden) / (12 * hidden * hidden)))
        assumed.append("layers")
    if not heads:
        heads = 96 if hidden % 96 == 0 and hidden > 8192 else hidden // 128
        assumed.append("heads")
    kind = "llama" if "LLAMA" in text.upper() else "bert" if "bert" in arch else "gpt"
    ffn = _whole(record["ffn"]) if record["ffn"].isdigit() else 4 * hidden
    tied = False if "Nemotron" in text else None
    seq = _whole(record["seq_len"], 1024)
    return Model(kind, layers, hidden, heads, _whole(record["kv_heads"], heads), ffn, vocab, tied=tied, positions=seq, name=text), assumed  # fmt: skip


def _row(record: dict[str, str]) -> Row | None:
    shape = _shape(record)
    gpu = next((name for key, name in _GPU if key in record["gpu"]), None)
    count = _whole(record["gpu_count"])
    if shape is None or gpu is None or not count:
        return None
    model, assumed = shape
    gpn = min(_whole(record["gpus_per_node"], 8), count)
    nodes = max(1, count // gpn)
    source = record["source_id"]
    if source == "deepspeed_azure_2022" or "ND96amsr" in record["interconnect"]:
        gpu = "ndm-a100-v4"
    network = _network(record, nodes, gpn)
    overrides = {"inter_node_gbps": network} if network and gpu != "ndm-a100-v4" else {}
    cluster = Cluster.named(gpu, nodes, gpn, **overrides)

    tp, pp, cp = (_whole(record[name], 1) for name in ("tp", "pp", "cp"))
    dp = count // (tp * pp * cp)
    seq, micro, total = (
        _whole(record["seq_len"]),
        _whole(record["micro_batch"]),
        _whole(record["global_batch"]),
    )
    if source == "zeropp" and (
        found := re.match(r"(\d+) tokens", record["micro_batch"] + record["sharding"] + record["notes"])
    ):
        seq, micro = 1024, int(found[1]) // 1024
    if not seq:
        if "tokens per GPU" not in record["micro_batch"]:
            return None
        seq, micro = 1024, max(1, _whole(record["micro_batch"].split()[0]) // 1024)
        assumed.append("seq_len")
    if not micro:
        micro = 1
        assumed.append("micro_batch")
    accum = (
        _whole(record["grad_accum"]) or max(1, round(total / (dp * micro)))
        if total or record["grad_accum"]
        else pp
    )
    text = record["act_ckpt"]
    recompute = "full" if text.startswith("full") else "selective" if text.startswith("selective") else "none"
    if "MaxText" in record["sharding"] or "PaxML" in record["sharding"]:
        recompute = "full"
        assumed.append("recompute")
    if source == "azureml_guide":
        record = {
            **record,
            "zero_stage": "1",
        }  # DeepSpeed's BF16 optimizer divides its state whatever the stage
    zero = (
        int(record["zero_stage"])
        if record["zero_stage"].isdigit()
        else 1
        if source != "korthikanti_2022"
        else 0
    )
    precision = (
        "fp8"
        if "fp8" in record["precision"]
        else "fp16"
        if record["precision"].startswith("fp16")
        else "bf16"
    )
    offload = None
    if "cpu (params" in record["offload"] or record["offload"].startswith("cpu ("):
        offload = "all"
    elif record["offload"].startswith("cpu optimizer"):
        offload = "optimizer"
    virtual = _whole(record["vp"], 1)
    if "12 in v25.05" in record["notes"] or (virtual == 1 and "Nemotron4-340B" in record["model"]):
        virtual = 12
        assumed.append("virtual_pp")
    if source == "megatron_readme_h100" and pp > 1:
        virtual = max(1, model.layers // pp // 2)
        assumed.append("virtual_pp")
    layout = Layout(
        zero=zero, tp=tp, pp=pp, virtual_pp=virtual, cp=cp, ep=_whole(record["ep"], 1), micro_batch=micro,
        grad_accum=accum, seq_len=seq, precision=precision, recompute=recompute, offload=offload,
    )  # fmt: skip
    step, hardware = _number(record["step_time_s"]), _number(record["tflops_per_gpu"])
    if step is None and hardware is not None and record["flops_kind"].startswith("hardware"):
        if "CUDA_LAUNCH_BLOCKING=1" in record["notes"]:
            return None
        step = (
            model.flops_per_token(seq, convention="hardware")
            * micro
            * accum
            * dp
            * seq
            / count
            / hardware
            / 1e12
        )
        assumed.append("step time from TFLOPs")
    if step is None and (rate := _number(record["tokens_per_s"])) and total:
        step = total * seq / rate
        assumed.append("step time from tokens/s")
    if "ZeRO++" in record["sharding"]:
        return None  # quantised collectives: not a layout the planner has
    if source == "zeropp" and record["interconnect"] == "unstated":
        step = None  # a network-bound run on a network nobody named
    memory = _number(record["memory_gb"])
    if memory is not None and record["memory_kind"].startswith("GiB"):
        memory *= 1024**3 / 1e9
    elif memory is not None and "nvidia-smi" in record["memory_kind"]:
        memory *= 1024**2 / 1e6  # nvidia-smi prints MiB; the table's "GB" are thousands of them
    headline = hardware if source == "deepspeed_azure_2022" and hidden_over(model, 12288) else None
    return Row(
        source, f"{model.name} {count}x{gpu} mb{micro} ga{accum} s{seq} tp{tp} pp{pp}", record["row"], model, cluster, layout,
        _profile(source, record, precision), step, memory, record["memory_kind"],
        "OUT OF MEMORY" in record["notes"] or "OOM" in record["memory_kind"], tuple(assumed), headline, record["source_url"],
    )  # fmt: skip


def hidden_over(model: Model, hidden: int) -> bool:
    return model.hidden > hidden


def _profile(source: str, record: dict[str, str], precision: str) -> str | None:
    """Which calibration profile a row's source belongs to."""
    gpu = record["gpu"]
    if source == "mosaicml_llm_foundry":
        return "h100/fsdp-2023" if gpu.startswith("H100") else "a100/fsdp-2023"
    if source == "nvidia_dgxc":
        if "MaxText" in record["sharding"] or "PaxML" in record["sharding"]:
            return "h100/jax-2025"
        return "gb200/megatron-2025" if gpu.startswith("GB200") else "h100/megatron-2025"
    return {
        "deepspeed_azure_2022": "ndm-a100-v4/deepspeed-2022",
        "vtrain_single": "a100/megatron-2022",
        "korthikanti_2022": "a100/megatron-2022",
        "megatron_readme_h100": "h100/megatron-2025",
        "bloom_bigscience": "a100/megatron-deepspeed-2022",
        "azureml_guide": "ndm-a100-v4/megatron-deepspeed-2022",
        "zeropp": "v100/deepspeed-2022",
    }.get(source)

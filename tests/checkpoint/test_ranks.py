"""Several ranks: who writes what, resharding between world sizes and layouts, two nodes on one root."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import serai
from serai.checkpoint.catalog import generations

SCRIPT = Path(__file__).parent / "ranks_script.py"
DEADLINE_S = 180


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(world: int, folders: list[Path] | None, *arguments: object, expect: int = 0) -> list[str]:
    """Run the script once a rank; ``folders`` are socket folders, one a pretended node."""
    port = free_port()
    processes = []
    for rank in range(world):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if folders is not None:
            environment["XDG_RUNTIME_DIR"] = str(folders[rank])
        processes.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *map(str, arguments)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [expect] * world, "\n".join(outputs)
    return outputs


def losses(outputs: list[str]) -> dict[int, float]:
    found = {}
    for line in outputs[0].splitlines():
        if line.startswith("step "):
            _, step, loss = line.split()
            found[int(step)] = float.fromhex(loss)
    return found


def test_world_sizes_and_layouts_restore_into_one_another(tmp_path: Path) -> None:
    seen: dict[int, float] = {}
    for until, (world, layout) in enumerate([(1, "plain"), (2, "fsdp"), (3, "ddp"), (1, "fsdp")], start=1):
        outputs = launch(world, None, tmp_path / "ck", layout, until)
        seen |= losses(outputs)
        if until > 1:
            assert f"restored {until - 2}" in outputs[0]
    whole = losses(launch(1, None, tmp_path / "other", "plain", 4))
    assert seen.keys() == whole.keys()
    for step, loss in whole.items():
        assert seen[step] == pytest.approx(loss, rel=1e-5), step


def test_replicated_tensors_are_written_once_and_names_are_clean(tmp_path: Path) -> None:
    launch(2, None, tmp_path, "ddp", 1)
    (generation,) = generations(tmp_path)
    assert generation.world == 2
    loaded = serai.load(tmp_path)
    assert set(loaded["model"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    tensors = [*loaded["model"].values()]
    tensors += [t for entry in loaded["optimizer"]["state"].values() for t in entry.values()]
    payload = sum(t.numel() * t.element_size() for t in tensors)
    shards = sorted(tmp_path.glob("step-*/shard-*"))
    sizes = [path.stat().st_size for path in shards]
    assert len(shards) == 2
    assert sum(sizes) < payload + 20_000
    assert max(sizes) - min(sizes) < 600_000  # nothing here is large enough to be split further
    assert loaded["mine"]["rank"] == 0
    assert torch.equal(loaded["mine"]["tensor"], torch.full((3,), 0.0))
    assert torch.equal(serai.load(tmp_path, rank=1)["mine"]["tensor"], torch.full((3,), 1.0))


def test_replicas_that_are_none_are_refused_with_the_name(tmp_path: Path) -> None:
    outputs = launch(2, None, tmp_path, "diverged", 1)
    assert all("S412" in output and "0.weight" in output for output in outputs)
    assert generations(tmp_path) == []


def test_two_nodes_share_a_root(tmp_path: Path) -> None:
    nodes = []
    for name in ("n0", "n1"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        nodes.append(folder)
    first = losses(launch(2, nodes, tmp_path / "ck", "fsdp", 3))
    outputs = launch(2, nodes, tmp_path / "ck", "fsdp", 6)
    assert "restored 2 durable" in outputs[0]
    whole = losses(launch(1, None, tmp_path / "other", "plain", 6))
    for step, loss in (first | losses(outputs)).items():
        assert loss == pytest.approx(whole[step], rel=1e-5), step
    assert serai.verify(tmp_path / "ck").ok
    assert not list((tmp_path / "ck").glob("step-*/records"))


def test_a_killed_rank_resumes_from_memory_with_the_same_bits(tmp_path: Path) -> None:
    launch(2, None, tmp_path / "ck", "fsdp", 6, "kill", 3, expect=-9)
    outputs = launch(2, None, tmp_path / "ck", "fsdp", 6)
    assert "restored 3 memory" in outputs[0]
    whole = losses(launch(2, None, tmp_path / "other", "fsdp", 6))
    assert losses(outputs) == {step: loss for step, loss in whole.items() if step > 3}

"""The agent's memory, windows, linked files and tiers, seen from one process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import serai
from serai.checkpoint.agent import slots
from serai.checkpoint.agent.client import AgentClient, ensure_agent
from serai.checkpoint.catalog import generations
from serai.checkpoint.memory import available_bytes
from serai.errors import CheckpointError


def state(seed: int, count: int = 400_000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(count, generator=generator),
        "strided": torch.randn(64, 1000, generator=generator).t(),
        "half": torch.randn(1001, generator=generator).half(),
        "n": seed,
    }


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a)


def ask(root: Path) -> AgentClient:
    return AgentClient(ensure_agent(root), hear=lambda message, fds: None)


def test_without_memory_saves_stream_through_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The agent is told that nearly all memory is spoken for.
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([_stub_folder(tmp_path, "_LEAVE_FREE = 1.0"), os.environ.get("PYTHONPATH", "")]),
    )
    root = tmp_path / "ck"
    saved = state(1, 18_000_000)  # 72 MB: two windows
    with serai.Checkpointer(root) as checkpointer:
        with pytest.warns(UserWarning, match="does not fit into"):
            handle = checkpointer.save(1, saved)
        handle.wait()
        assert not handle.done("memory")
        saved["n"] = 2
        checkpointer.save(2, saved).wait()
    assert serai.verify(root).ok
    assert equal(serai.load(root), saved)
    live = state(3, 18_000_000)
    restored = serai.Checkpointer(root).restore(live)
    assert restored is not None
    assert restored.tier == "durable"
    assert equal(live, saved)


def _stub_folder(tmp_path: Path, line: str) -> str:
    """A ``sitecustomize`` that changes one constant of the agent's slab, as a small machine would."""
    folder = tmp_path / "site"
    folder.mkdir()
    module = Path(slots.__file__).parent.parent.parent.parent
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(module)!r})\n"
        f"import serai.checkpoint.agent.slots as slots\nslots.{line}\n"
    )
    return str(folder)


class Adapted(nn.Module):
    """A frozen base and a small part that trains, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(700, 700)
        self.adapter = nn.Linear(700, 4)
        self.base.requires_grad_(False)


def test_frozen_parameters_are_linked_not_written_again(tmp_path: Path) -> None:
    model = Adapted()
    with serai.Checkpointer(tmp_path, keep=serai.Keep(last=5)) as checkpointer:
        for step in range(3):
            nn.init.constant_(model.adapter.weight, float(step))
            checkpointer.save(step, {"model": model}).wait()
        with torch.no_grad():
            model.base.weight[3, 3] += 1  # somebody edits the frozen part: then it is written
        checkpointer.save(3, {"model": model}).wait()
    files = sorted(tmp_path.glob("step-*/frozen-00000-of-00001.safetensors"))
    inodes = [path.stat().st_ino for path in files]
    assert len(files) == 4
    assert inodes[0] == inodes[1] == inodes[2] != inodes[3]
    assert serai.verify(tmp_path).ok
    for step in range(4):
        loaded = serai.load(tmp_path, step=step)["model"]
        assert torch.equal(loaded["adapter.weight"], torch.full((4, 700), float(min(step, 2))))
    assert torch.equal(loaded["base.weight"], model.base.weight)
    live = Adapted()
    restored = serai.Checkpointer(tmp_path).restore({"model": live})
    assert restored is not None
    assert torch.equal(live.base.weight, model.base.weight)


def test_the_local_tier_is_read_first_and_the_root_alone_is_enough(tmp_path: Path) -> None:
    root, local = tmp_path / "root", tmp_path / "nvme"
    with serai.Checkpointer(root, local=local, memory=False) as checkpointer:
        handle = checkpointer.save(1, state(1))
        handle.wait("local", 60)
        handle.wait("durable", 60)
    live = state(2)
    restored = serai.Checkpointer(root, local=local).restore(live)
    assert restored is not None
    assert restored.tier == "local"
    assert equal(live, state(1))
    for path in local.glob("step-*/shard*"):
        path.write_bytes(b"garbage")
    live = state(2)
    with pytest.warns(UserWarning, match="passed over"):
        restored = serai.Checkpointer(root, local=local).restore(live)
    assert restored is not None
    assert restored.tier == "durable"
    assert equal(live, state(1))


def test_slots_are_bounded_and_reused_over_many_saves(tmp_path: Path) -> None:
    saved = state(1)
    checkpointer = serai.Checkpointer(tmp_path)
    checkpointer.restore(saved)
    agent = ask(tmp_path)
    sizes = set()
    for step in range(30):
        saved["a"][step] = step
        checkpointer.save(step, saved)
        sizes.add(agent.ask("status")["slab_bytes"])
    assert max(sizes) <= 3 * (4 << 20)
    agent.close()
    checkpointer.close()


def test_a_state_that_grows_gets_new_slots_and_the_old_ones_go(tmp_path: Path) -> None:
    checkpointer = serai.Checkpointer(tmp_path, keep=serai.Keep(last=9))
    agent = ask(tmp_path)
    for step, count in enumerate([1000, 3_000_000, 6_000_000, 6_000_000, 6_000_000, 6_000_000]):
        checkpointer.save(step, {"w": torch.full((count,), float(step))}).wait()
    assert agent.ask("status")["slab_bytes"] <= 3 * (26 << 20) + (14 << 20)
    agent.close()
    checkpointer.close()
    for generation in generations(tmp_path):
        assert serai.load(tmp_path, step=generation.step)["w"].unique().tolist() == [float(generation.step)]


def test_the_agent_dies_and_the_next_save_starts_another(tmp_path: Path) -> None:
    checkpointer = serai.Checkpointer(tmp_path)
    checkpointer.save(1, {"x": 1}).wait()
    agent = ask(tmp_path)
    os.kill(agent.pid, 9)
    agent.close()
    handle = checkpointer.save(2, {"x": 2})
    handle.wait(timeout=60)
    checkpointer.close()
    assert serai.load(tmp_path)["x"] == 2


def test_available_memory_is_bounded_by_the_cgroup() -> None:
    files = {
        "/proc/meminfo": "MemTotal: 8000 kB\nMemAvailable: 4000 kB\n",
        "/proc/self/cgroup": "0::/job/step\n",
        "/sys/fs/cgroup/job/memory.max": "3000000",
        "/sys/fs/cgroup/job/memory.current": "1000000",
        "/sys/fs/cgroup/job/memory.stat": "inactive_file 50000\n",
        "/sys/fs/cgroup/job/step/memory.max": "max",
        "/sys/fs/cgroup/job/step/memory.current": "1000000",
    }
    assert available_bytes(files.get) == (2_050_000, "the memory cgroup")
    files["/proc/self/cgroup"] = "5:memory:/v1\n0::/\n"
    files["/sys/fs/cgroup/memory/v1/memory.limit_in_bytes"] = "2500000"
    files["/sys/fs/cgroup/memory/v1/memory.usage_in_bytes"] = "500000"
    assert available_bytes(files.get) == (2_000_000, "the memory cgroup")
    del files["/proc/self/cgroup"]
    assert available_bytes(files.get) == (4_096_000, "free RAM")


def test_on_error_raise_surfaces_at_the_next_save(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    checkpointer = serai.Checkpointer(root, on_error="raise")
    checkpointer.save(1, {"x": 1}).wait()
    (root / "step-00000002-0001-000001").write_text("in the way")
    handle = checkpointer.save(2, {"x": 2})
    with pytest.raises(CheckpointError, match="a file stands where"):
        handle.wait(timeout=30)
    with pytest.raises(CheckpointError, match="step 2 did not reach the durable tier"):
        checkpointer.save(3, {"x": 3})
    checkpointer.save(4, {"x": 4}).wait(timeout=30)
    checkpointer.close()
    assert [g.step for g in generations(root)] == [4, 1]


def test_on_error_warn_says_it_once_and_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    checkpointer = serai.Checkpointer(root)
    checkpointer.save(1, {"x": 1}).wait()
    (root / "step-00000002-0001-000001").write_text("in the way")
    with pytest.raises(CheckpointError):
        checkpointer.save(2, {"x": 2}).wait(timeout=30)
    with pytest.warns(UserWarning, match="training goes on"):
        checkpointer.save(3, {"x": 3}).wait(timeout=30)
    checkpointer.close()


def test_a_stopped_agent_costs_one_deadline_and_then_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serai.checkpoint.checkpointer._ANSWER_S", 1.0)
    checkpointer = serai.Checkpointer(tmp_path)
    checkpointer.save(1, {"x": 1}).wait()
    agent = ask(tmp_path)
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        first = checkpointer.save(2, {"x": 2})
        assert time.monotonic() - began < 10
        assert first.error is not None
        assert first.error.code == "S424"
        began = time.monotonic()
        with pytest.warns(UserWarning, match="did not answer"):
            checkpointer.save(3, {"x": 3})
        assert time.monotonic() - began < 5
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    agent.ask("ping", timeout=30)
    checkpointer.save(4, {"x": 4}).wait(timeout=30)
    agent.close()
    checkpointer.close()
    assert serai.load(tmp_path)["x"] == 4

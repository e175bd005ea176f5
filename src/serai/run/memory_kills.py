"""Whether the kernel's out-of-memory killer struck, and when: a SIGKILL does not say who sent it."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["MemoryKills", "count"]

_NEAR_S = 3.0


class MemoryKills:
    """Watches the kernel's counters of out-of-memory kills: this process's cgroups, and the whole host's.

    A rise of the host's counter may be a neighbour's, so a kill is only put down to memory when a counter rose
    at that very moment. ``look`` is called about once a second.
    """

    def __init__(self) -> None:
        self._last = count()
        self._rises: list[float] = []

    def look(self) -> None:
        now = count()
        if now > self._last:
            self._rises.append(time.time())
        self._last = now

    def near(self, moment: float | None) -> bool:
        """Whether a kill for memory happened about then (unix seconds)."""
        self.look()
        return moment is not None and any(abs(rise - moment) <= _NEAR_S for rise in self._rises)


def count() -> int:
    """Kills so far, over all counters that can be read."""
    total = 0
    for path in (*_cgroup_files(), Path("/proc/vmstat")):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdigit():
                total += int(value)
    return total


def _cgroup_files() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            files.append(Path(f"/sys/fs/cgroup{place}/memory.events"))
        elif "memory" in controllers.split(","):
            files.append(Path(f"/sys/fs/cgroup/memory{place}/memory.oom_control"))
    return files

"""Shared anonymous memory by address: map, pre-fault, copy with every core the process may use.

First-touched pages cost ten times a copy, so slots are faulted in once, beforehand. ``ctypes.memmove``
releases the GIL, so plain threads copy in parallel whatever ``OMP_NUM_THREADS`` says.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Mapping", "available_bytes", "copy_spans", "usable_cores"]

_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_HUGE_PAGE = 2 << 20
# Below this a second thread costs more than it copies.
_PARALLEL_BYTES = 4 << 20
_SPAN_BYTES = 8 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Span = tuple[int, int, int]  # destination address, source address, bytes


class Mapping:
    """One memfd mapped into this process."""

    def __init__(self, fd: int, size: int, *, writable: bool = True) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.size = size
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
        self._exporter = (ctypes.c_char * size).from_buffer(self._map) if writable else None
        if self._exporter is not None:
            self.address = ctypes.addressof(self._exporter)
        else:
            import numpy as np

            # ctypes refuses read-only buffers; numpy tells their address.
            self.address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)
        self.memory = memoryview(self._map)

    def populate(self, pool: ThreadPoolExecutor | None = None) -> None:
        """Fault every page in (several threads at once where a pool is given). Quiet where unsupported."""
        advice = _MADV_POPULATE_WRITE if self._exporter is not None else _MADV_POPULATE_READ
        step = 64 << 20

        def one(offset: int) -> None:
            length = min(step, self.size - offset)
            if _libc.madvise(self.address + offset, length, advice) != 0:
                code = ctypes.get_errno()
                if code in (errno.ENOMEM, errno.EFAULT):
                    raise MemoryError(f"no memory for {length} bytes of checkpoint slab")

        offsets = range(0, self.size, step)
        if pool is None:
            for offset in offsets:
                one(offset)
        else:
            list(pool.map(one, offsets))

    def close(self) -> None:
        """Unmap. Quiet when a view is still alive: the mapping then goes with it."""
        self.memory.release()
        self._exporter = None
        try:
            self._map.close()
        except BufferError:
            pass


def round_up(size: int) -> int:
    return max(_HUGE_PAGE, -(-size // _HUGE_PAGE) * _HUGE_PAGE)


def copy_spans(spans: Sequence[Span], pool: ThreadPoolExecutor | None, threads: int) -> None:
    """Copy memory to memory, split evenly over ``threads`` (one of them the caller)."""
    total = sum(span[2] for span in spans)
    move = ctypes.memmove
    if pool is None or threads < 2 or total < _PARALLEL_BYTES:
        for destination, source, nbytes in spans:
            move(destination, source, nbytes)
        return
    lanes = _split(spans, total, threads)

    def run(lane: list[Span]) -> None:
        for destination, source, nbytes in lane:
            move(destination, source, nbytes)

    futures = [pool.submit(run, lane) for lane in lanes[1:]]
    run(lanes[0])
    for future in futures:
        future.result()


def _split(spans: Sequence[Span], total: int, parts: int) -> list[list[Span]]:
    """Cut the spans into ``parts`` lists of about equal bytes; long spans are cut, short ones kept whole."""
    share = -(-total // parts)
    lanes: list[list[Span]] = [[]]
    room = share
    for destination, source, nbytes in spans:
        while nbytes > room and len(lanes) < parts:
            if room >= _SPAN_BYTES:
                cut = room // 4096 * 4096
                lanes[-1].append((destination, source, cut))
                destination, source, nbytes = destination + cut, source + cut, nbytes - cut
            lanes.append([])
            room = share
        lanes[-1].append((destination, source, nbytes))
        room -= nbytes
    return lanes


def usable_cores() -> int:
    """Cores this process may run on (affinity and cgroup quota)."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_cores()
    return max(1, min(cores, quota) if quota else cores)


def _cgroup_cores() -> int | None:
    text = _read("/sys/fs/cgroup/cpu.max")
    if text:
        parts = text.split()
        if len(parts) == 2 and parts[0] != "max":
            return max(1, int(parts[0]) // int(parts[1]))
        return None
    quota = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        return max(1, int(quota) // int(period))
    return None


def available_bytes(read: Callable[[str], str | None] | None = None) -> tuple[int, str]:
    """Memory that can still be taken without swapping or an OOM kill, and what bounds it.

    The smaller of MemAvailable and what the process's own memory cgroup (v2 or v1) leaves.
    """
    read = read or _read
    bounds = [
        (int(line.split()[1]) * 1024, "free RAM")
        for line in (read("/proc/meminfo") or "").splitlines()
        if line.startswith("MemAvailable:")
    ]
    bounds += [
        (max(0, limit - usage + _stat_value(stat, reclaimable)), "the memory cgroup")
        for limit, usage, stat, reclaimable in _cgroup_memory(read)
    ]
    return min(bounds) if bounds else (0, "unknown memory")


def _cgroup_memory(read: Callable[[str], str | None]) -> list[tuple[int, int, str, str]]:
    found = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = f"/sys/fs/cgroup{path}", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = (
                f"/sys/fs/cgroup/memory{path}",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        while True:
            limit, usage = read(f"{base}/{names[0]}"), read(f"{base}/{names[1]}")
            if limit and usage and limit.strip() != "max" and int(limit) < 1 << 60:
                found.append((int(limit), int(usage), read(f"{base}/memory.stat") or "", names[2]))
            parent = os.path.dirname(base)
            if not parent.startswith("/sys/fs/cgroup") or parent == base:
                break
            base = parent
    return found


def _stat_value(stat: str, key: str) -> int:
    for line in stat.splitlines():
        if line.startswith(key + " "):
            return int(line.split()[1])
    return 0


def _read(path: str) -> str | None:
    try:
        with open(path) as stream:
            return stream.read()
    except OSError:
        return None

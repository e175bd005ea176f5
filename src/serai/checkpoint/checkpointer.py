"""``Checkpointer``: the face of the engine. Three lines in anybody's loop.

    ckpt = serai.Checkpointer("checkpoints")
    start = ckpt.restore(state)
    ckpt.save(step, state)

``save`` copies into the agent's slab and returns; the agent does everything slow in its own process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

import serai
from serai.checkpoint.agent.client import AgentClient, AgentFailed, canonical_root, ensure_agent
from serai.checkpoint.catalog import Generation, generations
from serai.checkpoint.format import generation_name
from serai.checkpoint.handle import SaveHandle
from serai.checkpoint.memory import Mapping, usable_cores
from serai.checkpoint.planning import SavePlan, fingerprint, make_plan
from serai.checkpoint.policy import Keep
from serai.checkpoint.ranks import Ranks
from serai.checkpoint.restore import Restored, restore
from serai.checkpoint.snapshot import fill_slot, fill_window, probe_replicas
from serai.checkpoint.state import Flat, Leaf, flatten, python_version
from serai.context import current_run
from serai.errors import CheckpointError, EnvironmentFault, SaveFailed, SeraiError, SpecError, StorageError
from serai.storage.registry import is_local, open_storage
from serai.units import format_bytes

__all__ = ["Checkpointer", "Durable", "Restored", "SaveHandle"]

log = logging.getLogger("serai.checkpoint")

LEASE_TIMEOUT_S = 60.0
STREAM_TIMEOUT_S = 600.0
_SLACK = 1 << 20
_BYE_S = 30.0
_NOTICE_S = 0.5
_PING_S = 0.2
_ANSWER_S = 10.0

OnError = Literal["warn", "pause", "raise"]
Hear = Callable[[dict[str, Any], list[int]], None]


@dataclass(frozen=True)
class Durable:
    """The newest generation known to be durable."""

    step: int
    generation: str
    time: float


class Checkpointer:
    """Saves and restores the state of a training run, over all ranks of a process group.

    Args:
        root: folder or URL (``s3://``, ``az://``, ``gs://``) of the durable tier. Inside a serai run it
            may be left out: the run's own place is used.
        local: a faster folder on this node (NVMe) that is written as well and read first.
        memory: keep the newest generation in the agent's memory, to restore from after a crash.
        replicas: copies in other nodes' memory (0 or 1).
        keep: which generations retention leaves alone.
        on_error: what a failed save does to training: ``"warn"`` warns once and goes on; ``"raise"``
            raises from the next ``save``; ``"pause"`` holds the next ``save`` until saving works again.
        process_group: the ranks that save together; the default group at construction if there is one.

    Every rank constructs it, calls ``restore`` and ``save`` alike. Raises ``EnvironmentFault`` when the
    agent cannot start, ``CheckpointError`` (S423) when another live run uses the root, and the storage's
    errors when the root cannot be written.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        local: str | os.PathLike[str] | None = None,
        memory: bool = True,
        replicas: int = 0,
        keep: Keep | None = None,
        on_error: OnError = "warn",
        process_group: Any = None,
    ) -> None:
        self.keep = keep or Keep()
        self.root = _resolve_root(root)
        self._local = None if local is None else canonical_root(local)
        if on_error not in ("warn", "pause", "raise"):
            raise SpecError(
                f"on_error={on_error!r}",
                code="S121",
                expected='"warn", "pause" or "raise"',
                next_step='on_error="warn"',
            )
        if replicas != 0:
            raise SpecError(
                f"replicas={replicas!r} is not supported in this version", code="S122", expected="replicas=0"
            )
        self._on_error: OnError = on_error
        self._memory = memory
        self._ranks = Ranks(process_group)
        self._lock = threading.RLock()
        self._handles: dict[int, SaveHandle] = {}
        self._newest_durable: Durable | None = None
        self._failure: SeraiError | None = None
        self._warned: set[str] = set()
        self._warned_once: set[str] = set()
        self._unchanged: tuple[int, int] | None = None
        self._sequence = 0
        self._plan: SavePlan | None = None
        self._plan_known_to_agent: str | None = None
        self._slots: dict[int, Mapping] = {}
        self._closed = False
        self._replaced = False
        self._silent = False
        self._session = ""
        self._attempt = 0
        self._members: list[int] = [0]
        self._agent: AgentClient | None = None
        try:
            self._connect()
        except BaseException:
            self._let_go()
            raise
        self._threads = max(1, usable_cores() // max(1, len(self._members)))
        self._pool = ThreadPoolExecutor(max(1, self._threads), thread_name_prefix="serai-copy")
        self._finalizer = weakref.finalize(self, _abandon, self._pool, self._agent)

    # Public

    def save(
        self, step: int, state: MutableMapping[str, Any], *, metrics: dict[str, float] | None = None
    ) -> SaveHandle:
        """Copy ``state`` and return; everything in it may change as soon as this returns.

        Weights, optimizer, values and generators become one generation, visible only as a whole. A step
        that exists gets a new generation. Never raises for a failing disk or agent unless
        ``on_error="raise"``; raises at once for a state that cannot be stored.
        """
        self._require_open()
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise SpecError(f"step={step!r}", code="S123", expected="an integer of at least 0")
        began = time.perf_counter()
        self._surface_failure()
        sequence = self._sequence
        self._sequence += 1
        handle = SaveHandle(step, generation_name(step, self._attempt, sequence), sequence)
        flat = flatten(state)
        plan = self._plan_for(flat.leaves)
        handle.bytes = plan.total
        with self._lock:
            self._handles[sequence] = handle
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        try:
            self._save(handle, plan, flat, numbers)
        except AgentFailed as error:
            self._again(handle, plan, flat, numbers, error)
        except (SaveFailed, StorageError) as error:
            self._fail(handle, error)
        handle.stall.call = time.perf_counter() - began - handle.stall.back_pressure
        self._forget_old_handles()
        return handle

    def restore(
        self, state: MutableMapping[str, Any], *, step: int | None = None, strict: bool = True
    ) -> Restored | None:
        """Fill ``state`` in place from the newest generation that verifies on every rank.

        Args:
            state: as given to ``save``. Tensors are copied into, dict entries set, objects get
                ``load_state_dict``; random number generators come last.
            step: that step's newest generation instead.
            strict: names, shapes and dtypes must match; else what matches is taken.

        Returns ``None`` when there is no checkpoint. On an error or ``None`` the state is untouched.
        """
        self._require_open()
        storages = [("durable", open_storage(self.root))]
        if self._local:
            storages.insert(0, ("local", open_storage(self._local)))
        result = restore(
            state,
            ranks=self._ranks,
            agent=self._agent,
            storages=storages,
            step=step,
            strict=strict,
            pool=self._pool,
        )
        self._reserve(state)
        return result

    def generations(self) -> list[Generation]:
        """What is committed in the root, newest first."""
        return generations(self.root)

    @property
    def last_durable(self) -> Durable | None:
        """The newest generation of this session known to be durable."""
        with self._lock:
            return self._newest_durable

    def close(self, timeout: float | None = None) -> None:
        """Wait until the last save is durable, then let go of the agent. Raises when the last save failed.

        ``timeout`` in seconds bounds the wait (``SaveFailed`` S416). Closing twice does nothing.
        """
        if self._closed:
            return
        try:
            with self._lock:
                newest = max(self._handles.values(), key=lambda handle: handle.sequence, default=None)
            if newest is not None:
                newest.wait("durable", timeout)
        finally:
            self._closed = True
            if self._agent is not None:
                try:
                    # The answer comes when old generations are removed as well.
                    self._agent.ask("bye", patience=_BYE_S, timeout=_BYE_S + 5.0)
                except CheckpointError:
                    pass
                self._agent.close()
            self._finalizer.detach()
            self._pool.shutdown(wait=False)
            for mapping in self._slots.values():
                mapping.close()
            self._slots.clear()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    # Connecting

    def _connect(self) -> None:
        """Claim an attempt, meet the agent, learn which ranks share it. Every rank does this together."""
        claimed: dict[str, Any] | SeraiError
        try:
            if self._ranks.first:
                session = uuid.uuid4().hex
                client = self._reach()
                self._agent = client
                claimed = {
                    "session": session,
                    "attempt": client.ask("claim", session=session, timeout=120.0)["attempt"],
                }
            else:
                claimed = {}
        except SeraiError as error:
            claimed = error
        answer = self._ranks.broadcast(claimed)
        if isinstance(answer, SeraiError):
            raise answer
        self._session, self._attempt = answer["session"], answer["attempt"]
        problem: SeraiError | None = None
        try:
            if self._agent is None:
                self._agent = self._reach()
            self._hello(self._agent)
        except SeraiError as error:
            problem = error
        place = (_boot_id(), self._agent.pid if self._agent else 0)
        found = self._ranks.gather((place, problem))
        for rank, (_, trouble) in enumerate(found):
            if trouble is not None:
                raise (
                    trouble
                    if rank == self._ranks.rank
                    else CheckpointError(
                        f"rank {rank}: {trouble.message}", code=trouble.code, where=trouble.where
                    )
                )
        self._members = [rank for rank, (where, _) in enumerate(found) if where == place]
        assert self._agent is not None
        self._agent.ask("members", ranks=self._members)

    def _reach(self) -> AgentClient:
        last: SeraiError | None = None
        for _ in range(3):  # an agent that was about to leave may close the door once
            path = ensure_agent(self.root, local=self._local)
            try:
                client = AgentClient(path, hear=_weakly(self._hear))
            except AgentFailed as error:
                last = error
                continue
            try:
                client.ask("ping")
            except AgentFailed as error:
                client.close()
                last = error
            else:
                return client
        raise EnvironmentFault(
            f"the checkpoint agent cannot be reached: {last}", code="S226", where=self.root
        )

    def _hello(self, client: AgentClient) -> None:
        client.hello(
            session=self._session,
            attempt=self._attempt,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            run=_run_name(),
            memory=self._memory,
            keep={"last": self.keep.last, "every": self.keep.every, "best": self.keep.best},
        )

    def _live_agent(self) -> AgentClient:
        """The agent; a new one when the old one died. What only its memory held is then lost."""
        if self._agent is not None and self._agent.alive:
            if self._silent:
                # It did not answer before: training does not wait for it again until it does.
                self._agent.ask("ping", timeout=_PING_S)
                self._silent = False
            return self._agent
        self._silent = False
        if self._agent is not None:
            self._agent.close()
        self._slots.clear()
        self._plan_known_to_agent = None
        client = self._reach()
        self._hello(client)
        client.ask("members", ranks=self._members)
        self._agent = client
        with self._lock:
            for handle in self._handles.values():
                if handle.done("memory") and not handle.settled:
                    handle.fail(
                        SaveFailed(f"the agent died before step {handle.step} was durable", code="S417")
                    )
        return client

    # Saving

    def _plan_for(self, leaves: list[Leaf]) -> SavePlan:
        signature = fingerprint(leaves)
        if self._plan is None or self._plan.signature != signature:
            self._plan = make_plan(leaves, self._ranks, signature)
        return self._plan

    def _reserve(self, state: MutableMapping[str, Any]) -> None:
        """Have slots pre-faulted while the first steps run. Optimizer state that will come is counted in."""
        try:
            flat = flatten(state)
            size = _expected_bytes(state, flat.leaves) // max(1, self._shared_by(flat.leaves))
            self._live_agent().ask("reserve", size=size + _SLACK)
        except (SeraiError, RuntimeError) as error:
            log.debug("no slots reserved: %s", error)

    def _shared_by(self, leaves: list[Leaf]) -> int:
        """By how many ranks the bytes of a replicated state are divided."""
        return 1 if any(leaf.holders is not None for leaf in leaves) else self._ranks.world_size

    def _save(self, handle: SaveHandle, plan: SavePlan, flat: Flat, metrics: dict[str, float]) -> None:
        if not self._save_in_memory(handle, plan, flat, metrics):
            self._save_streaming(handle, plan, flat, metrics)

    def _again(
        self, handle: SaveHandle, plan: SavePlan, flat: Flat, metrics: dict[str, float], error: AgentFailed
    ) -> None:
        """The agent failed in the middle: a dead one is replaced at once, a silent one is left alone."""
        agent = self._agent
        if agent is not None and not agent.wait_for_end(_NOTICE_S):
            self._silent = True
            self._fail(handle, error)
            return
        try:
            self._save(handle, plan, flat, metrics)
        except SeraiError as second:
            self._fail(handle, second)

    def _save_in_memory(
        self, handle: SaveHandle, plan: SavePlan, flat: Flat, metrics: dict[str, float]
    ) -> bool:
        """Copy into a slot and seal it; ``False`` when no slot fits into memory."""
        began = time.perf_counter()
        deadline = began + LEASE_TIMEOUT_S
        while True:
            answer, fds = self._live_agent().ask_with_fds(
                "lease",
                sequence=handle.sequence,
                size=plan.total,
                known=list(self._slots),
                patience=1.0,
                timeout=_ANSWER_S,
            )
            if answer.get("reason") != "busy" or time.perf_counter() > deadline:
                break
        try:
            number = answer["slot"]
            if number is None and answer["reason"] == "memory":
                self._warn_streaming(plan.total, answer["bound"])
                return False
            if number is None:
                raise SaveFailed(
                    f"no slot came free within {LEASE_TIMEOUT_S:.0f} s: earlier saves are still being written",
                    code="S419",
                    next_step="look at the storage's speed: serai ckpt ls",
                )
            if number not in self._slots:
                self._slots[number] = Mapping(fds[0], answer["size"])
        finally:
            for fd in fds:
                os.close(fd)
        for gone in self._slots.keys() - set(answer["alive"]):
            self._slots.pop(gone).close()
        handle.stall.back_pressure = time.perf_counter() - began
        fill_slot(plan, flat.leaves, self._slots[number], self._pool, self._threads)
        self._seal(handle, number, plan, flat, metrics)
        handle.arrive("memory")
        return True

    def _save_streaming(
        self, handle: SaveHandle, plan: SavePlan, flat: Flat, metrics: dict[str, float]
    ) -> None:
        """Copy through a small window while the agent writes: slow, but within any memory."""
        agent = self._live_agent()
        answer, fds = agent.ask_with_fds("stream", sequence=handle.sequence, step=handle.step)
        try:
            window = Mapping(fds[0], answer["size"])
        finally:
            for fd in fds:
                os.close(fd)
        try:
            for file in plan.files:
                for offset in range(0, file.size, window.size):
                    count = min(window.size, file.size - offset)
                    start = file.offset + offset
                    fill_window(plan, flat.leaves, window, start, start + count, self._pool, self._threads)
                    last = offset + count == file.size
                    agent.ask(
                        "window",
                        kind=file.kind,
                        size=file.size,
                        count=count,
                        last=last,
                        timeout=STREAM_TIMEOUT_S,
                    )
        except CheckpointError as error:
            if isinstance(error, AgentFailed):
                raise
            raise SaveFailed(
                error.message, code=error.code, where=error.where, next_step=error.next_step
            ) from error
        finally:
            window.close()
        self._seal(handle, None, plan, flat, metrics)

    def _warn_streaming(self, size: int, bound: str) -> None:
        if "streaming" not in self._warned_once:
            self._warned_once.add("streaming")
            warnings.warn(
                f"one snapshot of {format_bytes(size)} does not fit into {bound}: saves go through a small window "
                "and last as long as the storage takes",
                stacklevel=5,
            )

    def _adopt_slot(self, number: int, size: int, fd: int) -> None:
        """Map a slot before it is needed, so that the first save does not pay for its page tables."""
        mapping = Mapping(fd, size)
        mapping.populate()
        if self._slots.setdefault(number, mapping) is not mapping:
            mapping.close()

    def _seal(
        self, handle: SaveHandle, slot: int | None, plan: SavePlan, flat: Flat, metrics: dict[str, float]
    ) -> None:
        agent = self._live_agent()
        table = None if self._plan_known_to_agent == plan.identity else plan.table
        agent.ask(
            "seal",
            sequence=handle.sequence,
            step=handle.step,
            slot=slot,
            files=[{"kind": f.kind, "offset": f.offset, "size": f.size} for f in plan.files],
            plan=plan.identity,
            table=table,
            trees=flat.trees,
            probes=probe_replicas(plan, flat.leaves, handle.sequence),
            metrics=metrics,
            software={
                "serai": serai.__version__,
                "torch": str(torch.__version__),
                "python": python_version(),
            },
            protected=bool(self.keep.every and handle.step % self.keep.every == 0),
            timeout=_ANSWER_S,
        )
        self._plan_known_to_agent = plan.identity

    def _fail(self, handle: SaveHandle, error: SeraiError) -> None:
        handle.fail(error)
        with self._lock:
            self._failure = error

    def _surface_failure(self) -> None:
        """Tell the training loop about a save that failed in the background, at a defined place."""
        with self._lock:
            error, self._failure = self._failure, None
            unchanged, self._unchanged = self._unchanged, None
        if unchanged is not None:
            self._warn_unchanged(*unchanged)
        if error is None:
            return
        if self._on_error == "raise":
            raise error
        if error.code not in self._warned:
            self._warned.add(error.code)
            warnings.warn(f"a checkpoint failed, training goes on: {error}", stacklevel=3)
        if self._on_error == "pause":
            self._pause(error)

    def _warn_unchanged(self, before: int, step: int) -> None:
        if self._ranks.first and "unchanged" not in self._warned_once:
            self._warned_once.add("unchanged")
            warnings.warn(
                f"NOTHING CHANGED from step {before} to step {step}: not one byte of parameters or optimizer state. "
                "Either nothing is trained, or what is saved is not what is trained (an optimizer that holds other "
                "parameters, a copy of the model)",
                stacklevel=4,
            )

    def _pause(self, error: SeraiError) -> None:
        log.warning("training is paused until checkpoints can be written again: %s", error)
        while True:
            with self._lock:
                newest = max(self._handles.values(), key=lambda handle: handle.sequence, default=None)
            if newest is None or newest.done("durable"):
                self._warned.discard(error.code)
                return
            time.sleep(0.1)

    def _forget_old_handles(self) -> None:
        with self._lock:
            for sequence in [s for s, h in self._handles.items() if h.settled and s < self._sequence - 8]:
                del self._handles[sequence]

    # Hearing

    def _hear(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["event"] == "slot":
            self._adopt_slot(message["slot"], message["size"], fds[0])
            return
        if message["attempt"] != self._attempt:
            return
        sequence = message["sequence"]
        with self._lock:
            handle = self._handles.get(sequence)
        if message["event"] == "replaced":
            self._replaced = True
        elif message["event"] == "dropped":
            if handle is not None:
                self._superseded(handle)
        elif message["event"] == "unchanged":
            with self._lock:
                self._unchanged = (message["before"], message["step"])
        elif message["error"] is not None:
            error = _background_error(message)
            with self._lock:
                self._failure = error  # before the handle: whoever waits for it may save at once
            if handle is not None:
                handle.fail(error)
        else:
            self._arrived(message["tier"], sequence, message["step"])

    def _arrived(self, tier: str, sequence: int, step: int) -> None:
        with self._lock:
            for other, handle in self._handles.items():
                if other <= sequence:
                    if other < sequence and not handle.done(tier):
                        handle.superseded_by = step
                    handle.arrive(tier)
            if tier == "durable":
                self._failure = None
                self._warned.clear()
                self._newest_durable = Durable(
                    step, generation_name(step, self._attempt, sequence), time.time()
                )

    def _superseded(self, handle: SaveHandle) -> None:
        with self._lock:
            newer = [h for s, h in self._handles.items() if s > handle.sequence]
        handle.superseded_by = newer[0].step if newer else None

    def _let_go(self) -> None:
        if self._agent is not None:
            self._agent.close()

    def _require_open(self) -> None:
        if self._replaced:
            raise CheckpointError(
                "another Checkpointer of this process has taken over this root",
                code="S427",
                where=self.root,
                next_step="use the newer one, or close() one before constructing the next",
            )
        if self._closed:
            raise CheckpointError(
                "this Checkpointer is closed", code="S418", next_step="construct another one"
            )


def _abandon(pool: ThreadPoolExecutor, agent: AgentClient | None) -> None:
    """A Checkpointer that nobody closed: the agent flushes what was sealed, as after a crash."""
    pool.shutdown(wait=False)
    if agent is not None:
        agent.close()


def _weakly(hear: Hear) -> Hear:
    """The listening thread must not keep a forgotten Checkpointer, and with it a session, alive."""
    reference = weakref.WeakMethod(hear)

    def call(message: dict[str, Any], fds: list[int]) -> None:
        method = reference()
        try:
            if method is not None:
                method(message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    return call


def _resolve_root(root: str | os.PathLike[str] | None) -> str:
    if root is None:
        context = current_run()
        if context is None:
            raise SpecError(
                "Checkpointer has no root, and this process belongs to no serai run",
                code="S124",
                expected="a folder or URL",
                next_step='serai.Checkpointer("checkpoints"), or start the script with: serai run job.yaml',
            )
        root = context.checkpoints
    text = canonical_root(root)
    if is_local(text) and os.path.exists(text) and not os.path.isdir(text):
        raise SpecError(
            f"{text} is a file", code="S125", expected="a folder, or a name that is free", where=text
        )
    return text


def _run_name() -> str:
    context = current_run()
    return context.run_dir.name if context else ""


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as stream:
            boot = stream.read().strip()
    except OSError:
        boot = "unknown"
    return f"{boot}/{os.readlink('/proc/self/ns/net') if os.path.exists('/proc/self/ns/net') else ''}"


def _expected_bytes(state: MutableMapping[str, Any], leaves: list[Leaf]) -> int:
    """Bytes of the state once its optimizers have stepped: Adam's two moments where there are none yet."""
    total = sum(leaf.nbytes for leaf in leaves)
    for value in state.values():
        if isinstance(value, torch.optim.Optimizer) and not value.state:
            for group in value.param_groups:
                total += sum(2 * _local_bytes(p) + 64 for p in group["params"])
    return total


def _local_bytes(parameter: torch.Tensor) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()


def _background_error(message: dict[str, Any]) -> SeraiError:
    error = message["error"]
    return SaveFailed(
        f"step {message['step']} did not reach the {message['tier']} tier: {error['message']}",
        code=error["code"],
        where=error.get("where"),
        expected=error.get("expected"),
        next_step=error.get("next"),
    )

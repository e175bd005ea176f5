"""The agent process: accepts trainers, leases slots, lets tiers write, and outlives the trainers.

Started once a node and root by the first trainer (or a supervisor), in its own session, with no inherited
descriptors and no torch. It ends after a clean ``close`` or ten minutes after the last trainer died, when
everything sealed is durable.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from serai.checkpoint.agent.ledger import Generation, Ledger, NoMemory, Shard, ShardFile
from serai.checkpoint.agent.protocol import PROTOCOL, Channel, Closed
from serai.checkpoint.agent.publish import build_manifest, claim_attempt
from serai.checkpoint.agent.slots import Slot
from serai.checkpoint.agent.stream import WINDOW_BYTES, StreamedFile
from serai.checkpoint.agent.tier import Outcome, Tier, shard_record
from serai.checkpoint.agent.watch import ChangeWatch
from serai.checkpoint.format import generation_name, shard_name
from serai.checkpoint.policy import Keep
from serai.errors import CheckpointError, SeraiError
from serai.storage.registry import open_storage

__all__ = ["main"]

log = logging.getLogger("serai.agent")

_IDLE_EXIT_S = 600.0
_FAREWELL_S = 2.0
_TAKEOVER_WAIT_S = 20.0
_SEND_LIMIT_S = 10


class Trainer:
    """One connected rank."""

    def __init__(self, rank: int, pid: int, channel: Channel) -> None:
        self.rank = rank
        self.pid = pid
        self.channel = channel
        self.plans: dict[str, list[dict[str, Any]]] = {}
        self.holding: dict[int, Generation] = {}
        self.stream: _Stream | None = None
        self.window: Slot | None = None
        self.closed = False


class _Stream:
    """A save that goes through a window: the files that are done, and the one being written."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.finished: list[ShardFile] = []
        self.current: StreamedFile | None = None


class Session:
    """The trainers of one attempt on this node."""

    def __init__(self, identity: str, attempt: int, world_size: int, run: str) -> None:
        self.identity = identity
        self.attempt = attempt
        self.world_size = world_size
        self.run = run
        self.members: frozenset[int] = frozenset()
        self.trainers: dict[int, Trainer] = {}


class Agent:
    def __init__(self, root: str, local: str | None) -> None:
        self._lock = threading.RLock()
        self._ledger = Ledger(["durable"] + (["local"] if local else []), dropped=self._on_dropped)
        self._root = open_storage(root)
        self._tiers = [Tier("durable", self._root, self._ledger, Keep(), self._on_outcome)]
        if local:
            self._tiers.append(Tier("local", open_storage(local), self._ledger, Keep(), self._on_outcome))
        self._session: Session | None = None
        self._claimed: tuple[str, Channel] | None = None
        self._slots: dict[int, Slot] = {}
        self._watch = ChangeWatch()
        self._last_alive = time.monotonic()
        self._farewell = False
        self._stopping = threading.Event()

    # The process

    def serve(self, listener: socket.socket) -> None:
        for tier in self._tiers:
            tier.start()
        listener.settimeout(0.25)
        while not self._should_exit():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            channel = Channel(connection)
            channel.limit_sending(_SEND_LIMIT_S)
            threading.Thread(target=self._serve_one, args=(channel,), daemon=True).start()
        for tier in self._tiers:
            tier.stop()

    def stop(self) -> None:
        """Flush what is sealed, then exit."""
        self._stopping.set()

    def _should_exit(self) -> bool:
        with self._lock:
            alive = self._session is not None and bool(self._session.trainers)
            now = time.monotonic()
            if alive:
                self._last_alive = now
                return False
            if self._ledger.pending():
                return False
            if self._stopping.is_set():
                return True
            idle = now - self._last_alive
            return idle > (_FAREWELL_S if self._farewell else _IDLE_EXIT_S)

    # One connection

    def _serve_one(self, channel: Channel) -> None:
        trainer: Trainer | None = None
        try:
            while True:
                message, fds = channel.receive()
                for fd in fds:
                    os.close(fd)
                number = message.get("id")
                try:
                    if message["do"] == "hello":
                        trainer, answer = self._hello(message, channel)
                        reply: dict[str, Any] = answer
                        out: list[int] = []
                    elif message["do"] == "claim":
                        reply, out = self._claim(message, channel), []
                    else:
                        reply, out = self._handle(message, trainer)
                except SeraiError as error:
                    reply, out = {"error": error.to_json()["error"]}, []
                except (KeyError, TypeError, ValueError) as error:
                    reply, out = {"error": {"code": "S421", "message": f"bad message: {error!r}"}}, []
                try:
                    channel.send({"id": number, **reply}, out)
                finally:
                    for fd in out:
                        os.close(fd)
                if message["do"] == "bye":
                    return
        except Closed:
            pass
        finally:
            with self._lock:
                if self._claimed is not None and self._claimed[1] is channel:
                    self._claimed = None
            if trainer is not None:
                self._gone(trainer)
            channel.close()

    # Handlers return descriptors that are closed once they are sent.

    def _handle(self, message: dict[str, Any], trainer: Trainer | None) -> tuple[dict[str, Any], list[int]]:
        do = message["do"]
        if do == "ping":
            return {"pid": os.getpid()}, []
        if do == "status":
            return self._status(), []
        if trainer is None:
            raise CheckpointError(f"{do} before hello", code="S421")
        handler = {
            "members": self._members,
            "reserve": self._reserve,
            "lease": self._lease,
            "abandon": self._abandon,
            "seal": self._seal,
            "stream": self._stream_open,
            "window": self._stream_window,
            "memory": self._memory,
            "open": self._open,
            "shut": self._shut,
            "bye": self._bye,
        }.get(do)
        if handler is None:
            raise CheckpointError(f"unknown request {do!r}", code="S421")
        return handler(message, trainer)

    def _hello(self, message: dict[str, Any], channel: Channel) -> tuple[Trainer, dict[str, Any]]:
        if message["protocol"] != PROTOCOL:
            raise CheckpointError(
                f"the agent (pid {os.getpid()}) speaks protocol {PROTOCOL}, this serai {message['protocol']}",
                code="S422",
                expected="one version of serai on a node",
                next_step=f"kill {os.getpid()}",
            )
        self._await_vacancy(message["session"], channel)
        with self._lock:
            return self._enter(message, channel), {"pid": os.getpid()}

    def _claim(self, message: dict[str, Any], channel: Channel) -> dict[str, Any]:
        """Take an attempt for a run that nobody else on this node is in the way of."""
        self._await_vacancy(message["session"], channel)
        return {"attempt": claim_attempt(self._root, message["session"])}

    def _await_vacancy(self, session: str, channel: Channel) -> None:
        """Hold the root for ``session``; refuses while trainers of another one live."""
        deadline = time.monotonic() + _TAKEOVER_WAIT_S
        while True:
            with self._lock:
                self._replace_own(session, channel.peer_pid())
                current = self._session
                pids = set()
                if current is not None and current.identity != session:
                    pids = {trainer.pid for trainer in current.trainers.values()}
                if self._claimed is not None and self._claimed[0] != session:
                    pids.add(self._claimed[1].peer_pid())
                if not pids:
                    if self._claimed is None:
                        self._claimed = (session, channel)
                    return
            # A relaunched job may meet the dying processes of the one before.
            if time.monotonic() > deadline:
                shown = ", ".join(str(pid) for pid in sorted(pids))
                raise CheckpointError(
                    f"another live trainer uses this root (pid {shown})",
                    code="S423",
                    where=self._root.url,
                    expected="one training run at a time for a root",
                    next_step=f"stop it (kill {shown}), or give this run another root",
                )
            time.sleep(0.05)

    def _replace_own(self, session: str, pid: int) -> None:
        """A second Checkpointer of one process (a notebook cell run twice) takes over from the first."""
        current = self._session
        if self._claimed is not None and self._claimed[0] != session and self._claimed[1].peer_pid() == pid:
            self._claimed = None
        if current is None or current.identity == session:
            return
        first = current.trainers.get(0)
        if first is None or first.pid != pid:
            return
        for trainer in current.trainers.values():
            try:
                trainer.channel.send({"event": "replaced", "attempt": current.attempt, "sequence": -1})
            except Closed:
                pass
        current.trainers.clear()
        self._ledger.end_session()

    def _enter(self, message: dict[str, Any], channel: Channel) -> Trainer:
        session = self._session
        if session is None or session.identity != message["session"]:
            self._ledger.end_session()
            session = self._session = Session(
                message["session"], message["attempt"], message["world_size"], message["run"]
            )
            self._ledger.keep_in_memory = bool(message["memory"])
            keep = Keep(**message["keep"])
            for tier in self._tiers:
                tier.set_keep(keep)
        rank = message["rank"]
        trainer = Trainer(rank, channel.peer_pid(), channel)
        session.trainers[rank] = trainer
        self._farewell = False
        return trainer

    def _gone(self, trainer: Trainer) -> None:
        if trainer.stream is not None and trainer.stream.current is not None:
            trainer.stream.current.cancel()
        with self._lock:
            session = self._session
            for generation in trainer.holding.values():
                self._ledger.release(generation)
            if session is None or session.trainers.get(trainer.rank) is not trainer:
                return
            del session.trainers[trainer.rank]
            if not trainer.closed:
                log.info("rank %d (pid %d) is gone", trainer.rank, trainer.pid)
            if not session.trainers:
                self._farewell = trainer.closed
                self._last_alive = time.monotonic()
                self._ledger.end_session()

    # Requests

    def _members(self, message: dict[str, Any], trainer: Trainer) -> tuple[dict[str, Any], list[int]]:
        session = self._require_session()
        session.members = frozenset(message["ranks"])
        self._ledger.in_order = len(session.members) < session.world_size
        self._ledger.keep_ranks(session.members)
        return {}, []

    def _reserve(self, message: dict[str, Any], trainer: Trainer) -> tuple[dict[str, Any], list[int]]:
        def ready(slot: Slot) -> None:
            with self._lock:
                self._slots[slot.number] = slot
            try:
                trainer.channel.send({"event": "slot", "slot": slot.number, "size": slot.size}, [slot.fd])
            except Closed:
                pass

        return {"slots": self._ledger.reserve(message["size"], trainer.rank, ready)}, []

    def _lease(self, message: dict[str, Any], trainer: Trainer) -> tuple[dict[str, Any], list[int]]:
        session = self._require_session()
        key = (session.attempt, message["sequence"])
        deadline = time.monotonic() + message["patience"]
        try:
            slot = self._ledger.lease(key, trainer.rank, message["size"], deadline)
        except NoMemory as error:
            return {"slot": None, "reason": "memory", "bound": str(error)}, []
        if slot is None:
            return {"slot": None, "reason": "busy"}, []
        with self._lock:
            self._slots[slot.number] = slot
        known = slot.number in message["known"]
        answer = {"slot": slot.number, "size": slot.size, "alive": self._ledger.slots()}
        return answer, [] if known else [os.dup(slot.fd)]

    def _abandon(self, message: dict[str, Any], trainer: Trainer) -> tuple[dict[str, Any], list[int]]:
        session = self._require_session()
        self._ledger.abandon((session.attempt, message["sequence"]), trainer.rank)
        return {}, []

    def _seal(self, message: dict[str, Any], trainer: Trainer) -> tuple[dict[str, Any], list[int]]:
        session = self._require_session()
        if message["table"] is not None:
            trainer.plans = {message["plan"]: message["table"]}
        streamed = trainer.stream
        if message["slot"] is None and streamed is None:
            raise CheckpointError("a save without a slot or a stream", code="S421")
        shard = Shard(
            rank=trainer.rank,
            slot=None if message["slot"] is None else self._slots[message["slot"]],
            files=_files(message, trainer.rank, session.world_size),
            table=trainer.plans[message["plan"]],
            trees=message["trees"],
            probes=message["probes"],
            metrics=message["metrics"],
            software=message["software"],
            plan=message["plan"],
        )
        if message["slot"] is None and streamed is not None:
            shard.files = streamed.finished
            shard.streamed_to = "durable"
            trainer.stream = None
        generation = Generation(
            key=(session.attempt, message["sequence"]),
            step=message["step"],
            world_size=session.world_size,
            expected=session.members,
            run=session.run,
            created=time.time(),
            protected=message["protected"],
        )
        self._ledger.seal(generation, shard)
        return {}, []

    def _stream_open(self, message: dict[str, Any], trainer: Trainer) -> tuple[dict[str, Any], list[int]]:
        """Begin a save through a window, which is made once and stays the trainer's."""
        session = self._require_session()
        if trainer.stream is not None and trainer.stream.current is not None:
            trainer.stream.current.cancel()
        trainer.stream = _Stream(generation_name(message["step"], session.attempt, message["sequence"]))
        if trainer.window is None:
            trainer.window = Slot(-1, WINDOW_BYTES)
        return {"size": trainer.window.size}, [os.dup(trainer.window.fd)]

    def _stream_window(self, message: dict[str, Any], trainer: Trainer) -> tuple[dict[str, Any], list[int]]:
        """Write ``count`` bytes of the window to the file of that ``kind``; the last ones finish it."""
        stream, window = trainer.stream, trainer.window
        if stream is None or window is None:
            raise CheckpointError("a window without a stream", code="S421")
        if stream.current is None:
            name = shard_name(trainer.rank, self._require_session().world_size, message["kind"])
            stream.finished.append(ShardFile(name, message["kind"], 0, message["size"]))
            stream.current = StreamedFile(self._root, f"{stream.folder}/{name}", stream.finished[-1])
        current = stream.current
        try:
            current.write(window.mapping.memory[: message["count"]])
            if message["last"]:
                current.finish()
                stream.current = None
        except SeraiError:
            current.cancel()
            trainer.stream = None
            raise
        return {}, []

    def _memory(self, message: dict[str, Any], trainer: Trainer) -> tuple[dict[str, Any], list[int]]:
        found = [
            {"attempt": g.key[0], "sequence": g.key[1], "step": g.step, "whole": g.whole}
            for g in self._ledger.in_memory()
        ]
        return {"generations": found}, []

    def _open(self, message: dict[str, Any], trainer: Trainer) -> tuple[dict[str, Any], list[int]]:
        """Descriptors of a generation in memory: its manifest, its values, then its shards by rank."""
        generation = self._ledger.hold((message["attempt"], message["sequence"]))
        if generation is None:
            return {"found": False}, []
        try:
            manifest, values = build_manifest(
                run=generation.run,
                step=generation.step,
                key=generation.key,
                created=generation.created,
                world_size=generation.world_size,
                records={rank: shard_record(shard) for rank, shard in generation.shards.items()},
            )
        except SeraiError:
            self._ledger.release(generation)
            raise
        trainer.holding[id(generation)] = generation
        data = manifest.to_bytes()
        with _memory_file(data) as first, _memory_file(values) as second:
            fds = [os.dup(first.fileno()), os.dup(second.fileno())]
        shards = [generation.shards[rank] for rank in sorted(generation.shards)]
        slots = [shard.slot for shard in shards if shard.slot is not None]
        fds += [os.dup(slot.fd) for slot in slots]
        sizes = [len(data), len(values), *(slot.size for slot in slots)]
        places = [(number, file.offset) for number, shard in enumerate(shards) for file in shard.files]
        return {"found": True, "hold": id(generation), "sizes": sizes, "places": places}, fds

    def _shut(self, message: dict[str, Any], trainer: Trainer) -> tuple[dict[str, Any], list[int]]:
        generation = trainer.holding.pop(message["hold"], None)
        if generation is not None:
            self._ledger.release(generation)
        return {}, []

    def _bye(self, message: dict[str, Any], trainer: Trainer) -> tuple[dict[str, Any], list[int]]:
        trainer.closed = True
        deadline = time.monotonic() + message["patience"]
        while time.monotonic() < deadline and not all(tier.idle for tier in self._tiers):
            time.sleep(0.01)
        return {}, []

    def _status(self) -> dict[str, Any]:
        with self._lock:
            session = self._session
            trainers = [t.pid for t in session.trainers.values()] if session else []
        return {
            "pid": os.getpid(),
            "trainers": trainers,
            "slab_bytes": self._ledger.pool.allocated_bytes,
            "prefaulted": self._ledger.pool.prefaulted,
            "pending": self._ledger.pending(),
            "memory": [
                {"step": g.step, "tiers": {name: state.value for name, state in g.tiers.items()}}
                for g in self._ledger.in_memory()
            ],
        }

    def _require_session(self) -> Session:
        if self._session is None:
            raise CheckpointError("no session", code="S421")
        return self._session

    # Reports to trainers

    def _on_outcome(self, outcome: Outcome) -> None:
        generation = outcome.generation
        if outcome.tier == "durable" and outcome.error is None:
            before = self._watch.unchanged_since(generation)
            if before is not None:
                self._tell(
                    {
                        "event": "unchanged",
                        "attempt": generation.key[0],
                        "sequence": generation.key[1],
                        "step": generation.step,
                        "before": before,
                    }
                )
        self._tell(
            {
                "event": "outcome",
                "tier": outcome.tier,
                "attempt": generation.key[0],
                "sequence": generation.key[1],
                "step": generation.step,
                "seconds": outcome.seconds,
                "error": outcome.error.to_json()["error"] if outcome.error else None,
            }
        )

    def _on_dropped(self, generation: Generation) -> None:
        self._tell(
            {
                "event": "dropped",
                "attempt": generation.key[0],
                "sequence": generation.key[1],
                "step": generation.step,
            }
        )

    def _tell(self, message: dict[str, Any]) -> None:
        with self._lock:
            trainers = list(self._session.trainers.values()) if self._session else []
        for trainer in trainers:
            try:
                trainer.channel.send(message)
            except Closed:
                pass


def _files(message: dict[str, Any], rank: int, world_size: int) -> list[ShardFile]:
    return [
        ShardFile(shard_name(rank, world_size, file["kind"]), file["kind"], file["offset"], file["size"])
        for file in message["files"]
    ]


def _memory_file(data: bytes) -> Any:
    fd = os.memfd_create("serai-reply", os.MFD_CLOEXEC)
    stream = os.fdopen(fd, "wb")
    stream.write(data)
    stream.flush()
    return stream


def main(arguments: list[str] | None = None) -> int:
    """Run the agent of one root until nobody needs it; writes one byte to ``--ready`` when it listens."""
    parser = argparse.ArgumentParser(prog="serai-agent")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--local")
    parser.add_argument("--ready", type=int, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s"
    )
    path = Path(options.socket)
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(options.ready, b"1")  # another agent of this root is up, or about to be
        return 0
    try:
        path.unlink()
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(64)
    try:
        os.nice(5)
    except OSError:
        pass
    agent = Agent(options.root, options.local)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: agent.stop())
    os.write(options.ready, b"1")
    os.close(options.ready)
    log.info("serving %s", options.root)
    try:
        agent.serve(listener)
    finally:
        path.unlink(missing_ok=True)
        log.info("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())

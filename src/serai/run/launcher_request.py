"""What the supervisor asks of the launcher; a file of its own so that the launcher imports little."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["LaunchRequest"]


@dataclass(frozen=True)
class LaunchRequest:
    """One attempt.

    Attributes:
        command: the worker's command line; torchrun's variables tell each process its rank.
        processes: workers on this node.
        run_id: rendezvous id, fresh for every attempt.
        log_dir: folder of this attempt's logs and error files.
        working_folder: where the workers start.
        environment: variables added to every worker's.
        master_port: fixed port, or ``None`` to take a free one.
        shutdown_timeout_s: seconds between SIGTERM and SIGKILL for the workers that outlive a failed one.
    """

    command: list[str]
    processes: int
    run_id: str
    log_dir: str
    working_folder: str
    environment: dict[str, str]
    master_port: int | None = None
    shutdown_timeout_s: int = 15

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

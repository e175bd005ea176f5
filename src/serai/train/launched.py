"""How this process was launched: the one place where training reads torchrun's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from serai.errors import EnvironmentFault

__all__ = ["Launched"]


@dataclass(frozen=True)
class Launched:
    """Place of this process among all of a job.

    Attributes:
        local_world: processes of the job on this node.
        master: host and port of the rendezvous store, ``None`` for a single process started by hand.
        agent_store: whether the launcher's agent already serves the store there.
        attempt: names this launch among others that use the same store.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    master: tuple[str, int] | None
    agent_store: bool
    attempt: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launched:
        """Read what torchrun sets.

        Raises:
            EnvironmentFault: some of it is set, but not all (S233).
        """
        variables = os.environ if environ is None else environ
        if "RANK" not in variables and "WORLD_SIZE" not in variables:
            return cls(
                rank=0, world=1, local_rank=0, local_world=1, master=None, agent_store=False, attempt="0"
            )
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not variables.get(name)]
        if missing:
            raise EnvironmentFault(
                f"this process was launched without {', '.join(missing)}",
                code="S233",
                where="environment variables",
                expected="all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of RANK and WORLD_SIZE",
                next_step="start it with `serai run` or torchrun",
            )
        rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        run = variables.get("TORCHELASTIC_RUN_ID", "none")
        return cls(
            rank=rank,
            world=world,
            local_rank=int(variables.get("LOCAL_RANK", rank)),
            local_world=int(variables.get("LOCAL_WORLD_SIZE", world)),
            master=(variables["MASTER_ADDR"], int(variables["MASTER_PORT"])),
            agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=f"{run}/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}/{world}",
        )

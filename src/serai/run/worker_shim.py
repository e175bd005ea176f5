"""What stands between the launcher and a worker: a few lines, then ``exec``.

Runs as ``python -I -S worker_shim.py LOG PARENT_PID COMMAND...`` (no site, no serai, 10 ms). It

- asks the kernel to kill this process when its parent dies (a supervisor that is killed with -9 must not
  leave training behind), which survives ``exec``;
- sends stdout and stderr to the rank's log, appended, in the order in which they were written, and gives
  no stdin (it is the launcher's line to the supervisor);
- becomes the command, so the pid that the launcher knows is the worker itself.

``LOG`` may hold ``{rank}``, filled from torchrun's RANK; ``-`` leaves the output where it is.
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    log, parent, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    if log != "-":
        path = log.format(rank=f"{int(os.environ.get('RANK', '0')):05d}")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


main()

"""Ensure that a process does not outlive its parent, and that no process outlives the rank that started it.

The guards of ranks fork with this module loaded, so it imports almost nothing.
"""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["adopt_orphans", "end_descendants", "signal_on_parent_death"]

GRACE_S = 5.0  # after SIGTERM: srun needs some of it to end its step
HANGING_S = 2.0  # a process that hangs in the kernel outlives even SIGKILL
_PAUSE_S = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def signal_on_parent_death(number: signal.Signals) -> None:
    """Request that the kernel signals this process when its parent exits (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def die_with_parent() -> None:
    """For Popen's `preexec_fn`: request SIGKILL at the exit of the parent, and unblock signals that it blocks."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal_on_parent_death(signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent exits (prctl(2), PR_SET_CHILD_SUBREAPER), also of daemons."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(pid: int, *, grace_s: float = 0.0) -> None:
    """End all processes below `pid`: with SIGTERM, and after `grace_s` with SIGKILL. Local runs that they started continue."""
    began = time.monotonic()
    termed: set[int] = set()
    while running := _descendants(pid):
        elapsed_s = time.monotonic() - began
        if elapsed_s > grace_s + HANGING_S:
            return
        for one in running:
            with suppress(ProcessLookupError, PermissionError):
                if elapsed_s >= grace_s:
                    os.kill(one, signal.SIGKILL)
                elif one not in termed:
                    os.kill(one, signal.SIGTERM)
        termed.update(running)
        time.sleep(_PAUSE_S)


def _descendants(pid: int) -> list[int]:
    """Return the running processes below `pid`, except those of another run that one of them has started here."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  Path.iterdir is slower
        with suppress(OSError):  # it has exited
            state, parent = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state not in b"ZX":
                children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    pending = children.get(pid, [])
    while pending:
        one = pending.pop()
        if not _is_another_run(one):
            found.append(one)
            pending += children.get(one, [])
    return found


def _is_another_run(pid: int) -> bool:
    """Return whether it is the supervisor of a run without Slurm, whose ranks do not have this variable."""
    with suppress(OSError):
        return b"\0TOOLKIT_LOCAL=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return False

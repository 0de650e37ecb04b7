"""Keep processes together: the kernel signals a process when its parent exits, and keeps orphans below this process.

The guards of ranks fork with this module loaded, so it imports almost nothing.
"""

import ctypes
import signal

__all__ = ["adopt_orphans", "signal_on_parent_death"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def signal_on_parent_death(number: signal.Signals) -> None:
    """Request that the kernel signals this process when its parent exits (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent exits (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """For Popen's `preexec_fn`: request SIGKILL at the exit of the parent, and unblock signals that it blocks."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal_on_parent_death(signal.SIGKILL)

"""Ensure that a process does not outlive its parent: the kernel signals it when the parent exits.

The guards of ranks fork with this module loaded, so it imports almost nothing.
"""

import ctypes
import signal

__all__ = ["signal_on_parent_death"]

_PR_SET_PDEATHSIG = 1


def signal_on_parent_death(number: signal.Signals) -> None:
    """Request that the kernel signals this process when its parent exits (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def die_with_parent() -> None:
    """For Popen's `preexec_fn`: request SIGKILL at the exit of the parent, and unblock signals that it blocks."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal_on_parent_death(signal.SIGKILL)

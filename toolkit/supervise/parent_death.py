"""Processes that do not outlive their parent: the kernel signals them when it exits.

Ranks' guards fork with this module loaded, so it imports almost nothing.
"""

import ctypes
import signal

__all__ = ["signal_on_parent_death"]

_PR_SET_PDEATHSIG = 1


def signal_on_parent_death(number: signal.Signals) -> None:
    """Request a signal from the kernel for when the parent of this process exits (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def die_with_parent() -> None:
    """Between fork and exec: request KILL when the parent exits, and unblock the signals that the parent blocks."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal_on_parent_death(signal.SIGKILL)

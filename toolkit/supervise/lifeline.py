"""Processes that do not outlive the one that started them: the kernel tells them of its death.

Guards of ranks fork with this loaded, so it imports next to nothing.
"""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def hear_of_parents_death(number: signal.Signals) -> None:
    """Ask the kernel for a signal when the parent of this process dies (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def die_with_parent() -> None:
    """Between fork and exec: be killed when the parent dies, and hear the signals that the parent holds back."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    hear_of_parents_death(signal.SIGKILL)

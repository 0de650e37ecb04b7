"""A slurmctld that does not answer: told while it is waited for, and asked no second time by the same command."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from toolkit.errors import SchedulerRefusedError

SLOW_S = 2.0  # what has no answer for longer is told
REMEMBERED_S = 5.0  # longer than one command of ours takes between two questions; who waits for Slurm asks again
_WORDS = ("unable to contact slurm controller", "timed out", "did not answer")
# They ask slurmctld, and can do without an answer; what sbatch hands over is always handed over.
_ASKING = ("squeue", "sinfo", "scontrol", "scancel")

# PATH, the configuration and the cluster: what decides which slurmctld a command asks.
Controller = tuple[str, str, str]
_silent: dict[Controller, tuple[float, SchedulerRefusedError]] = {}
_told_at = float("-inf")


@contextmanager
def told_when_slow(command: str, timeout_s: float) -> Iterator[None]:
    """Say on stderr after `SLOW_S` that a command waits for Slurm, and for how long it may."""
    timer = threading.Timer(SLOW_S, _tell, [command, timeout_s])
    timer.daemon = True
    if timeout_s > 2 * SLOW_S:  # of a shorter wait there is nothing to tell
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(command: str, timeout_s: float) -> None:
    global _told_at
    if time.monotonic() - _told_at >= SLOW_S:  # several questions at a time are one silence
        _told_at = time.monotonic()
        sys.stderr.write(f"toolkit: Slurm does not answer {command} yet; it is waited for up to {timeout_s:.0f} s\n")


def silence_of(controller: Controller, argv: Sequence[str]) -> SchedulerRefusedError | None:
    """The failure of a moment ago, where a slurmctld that was silent then would be asked again."""
    when, error = _silent.get(controller, (float("-inf"), None))
    return copy.copy(error) if argv[0] in _ASKING and time.monotonic() - when < REMEMBERED_S else None


def remember(controller: Controller, argv: Sequence[str], error: SchedulerRefusedError) -> None:
    """Keep a failure that was slurmctld's silence; what it refused, it has answered."""
    if argv[0] in _ASKING and any(words in error.message.lower() for words in _WORDS):
        _silent[controller] = (time.monotonic(), error)

"""A slurmctld that does not respond: reported while the command waits, and not queried again by the same command."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from toolkit.errors import SchedulerRefusedError
from toolkit.talk import say

SLOW_S = 2.0  # what has no answer for longer is told
REMEMBERED_S = 5.0  # longer than one command of ours takes between two questions; who waits for Slurm asks again
_WORDS = ("unable to contact slurm controller", "timed out", "did not answer")
# Commands that query slurmctld and can do without a response; sbatch is always called.
_ASKING = ("squeue", "sinfo", "scontrol", "scancel")

# PATH, the configuration and the cluster: what decides which slurmctld a command asks.
Controller = tuple[str, str, str]


class Silences:
    """The slurmctlds that were silent a moment ago, as one command of ours has met them."""

    def __init__(self) -> None:
        self._silent: dict[Controller, tuple[float, SchedulerRefusedError]] = {}
        self._told_at = float("-inf")

    @contextmanager
    def told_when_slow(self, command: str, timeout_s: float) -> Iterator[None]:
        """Say on stderr after `SLOW_S` that a command waits for Slurm, and for how long it may."""
        timer = threading.Timer(SLOW_S, self._tell, [command, timeout_s])
        timer.daemon = True
        if timeout_s > 2 * SLOW_S:  # of a shorter wait there is nothing to tell
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _tell(self, command: str, timeout_s: float) -> None:
        if time.monotonic() - self._told_at >= SLOW_S:  # several questions at a time are one silence
            self._told_at = time.monotonic()
            say(f"Slurm has not responded to {command} yet; waiting up to {timeout_s:.0f} s")

    def of(self, controller: Controller, argv: Sequence[str]) -> SchedulerRefusedError | None:
        """The failure of a moment ago, where a slurmctld that was silent then would be asked again."""
        when, error = self._silent.get(controller, (float("-inf"), None))
        return copy.copy(error) if argv[0] in _ASKING and time.monotonic() - when < REMEMBERED_S else None

    def remember(self, controller: Controller, argv: Sequence[str], error: SchedulerRefusedError) -> None:
        """Keep a failure that was slurmctld's silence; what it refused, it has answered."""
        if argv[0] in _ASKING and any(words in error.message.lower() for words in _WORDS):
            self._silent[controller] = (time.monotonic(), error)


_OF_THIS_COMMAND: ContextVar[Silences | None] = ContextVar("silences of this command", default=None)


@contextmanager
def one_command() -> Iterator[None]:
    """Within, the Slurm queries of one command share their memory of silent controllers; other callers have none."""
    before = _OF_THIS_COMMAND.set(Silences())
    try:
        yield
    finally:
        _OF_THIS_COMMAND.reset(before)


_PRINTS_COMMANDS: ContextVar[bool] = ContextVar("--print-cmd was given", default=False)


@contextmanager
def printed_commands() -> Iterator[None]:
    """Within, each Slurm command is printed on stderr before it runs."""
    before = _PRINTS_COMMANDS.set(True)
    try:
        yield
    finally:
        _PRINTS_COMMANDS.reset(before)


def prints_commands() -> bool:
    """Whether the command that this is part of prints the Slurm commands that it runs."""
    return _PRINTS_COMMANDS.get()


def silences_of_this_command() -> Silences | None:
    """What the command that this is part of has met; None outside of one."""
    return _OF_THIS_COMMAND.get()

"""A slurmctld without a response: reported while toolkit waits, and not queried twice by the same command."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from toolkit.errors import SchedulerRefusedError
from toolkit.talk import say

SLOW_S = 2.0  # longer waits are reported
REMEMBERED_S = (
    5.0  # longer than one toolkit command needs between two queries; a command that waits for Slurm queries again
)
_PATTERNS = ("unable to contact slurm controller", "timed out", "did not answer", "did not respond")
# These query slurmctld, and toolkit can do without an answer; sbatch is always run.
_ASKING = ("squeue", "sinfo", "scontrol", "scancel")

# PATH, the configuration and the cluster: they decide which slurmctld a command queries.
Controller = tuple[str, str, str]


class Silences:
    """The slurmctlds that recently did not respond to one toolkit command."""

    def __init__(self) -> None:
        self._silent: dict[Controller, tuple[float, SchedulerRefusedError]] = {}
        self._reported_at = float("-inf")

    @contextmanager
    def report_when_slow(self, command: str, timeout_s: float) -> Iterator[None]:
        """Report on stderr after `SLOW_S` that a command is waiting for Slurm, and for how long it may."""
        timer = threading.Timer(SLOW_S, self._tell, [command, timeout_s])
        timer.daemon = True
        if timeout_s > 2 * SLOW_S:  # a shorter wait is not worth a message
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _tell(self, command: str, timeout_s: float) -> None:
        if time.monotonic() - self._reported_at >= SLOW_S:  # several queries at a time are one message
            self._reported_at = time.monotonic()
            say(f"Slurm has not responded to {command} yet; waiting up to {timeout_s:.0f} s")

    def of(self, controller: Controller, argv: Sequence[str]) -> SchedulerRefusedError | None:
        """The recent failure of a slurmctld that a command would query again; None otherwise."""
        when, error = self._silent.get(controller, (float("-inf"), None))
        return copy.copy(error) if argv[0] in _ASKING and time.monotonic() - when < REMEMBERED_S else None

    def remember(self, controller: Controller, argv: Sequence[str], error: SchedulerRefusedError) -> None:
        """Record a failure if slurmctld did not respond; an error message is a response."""
        if argv[0] in _ASKING and any(pattern in error.message.lower() for pattern in _PATTERNS):
            self._silent[controller] = (time.monotonic(), error)


_OF_THIS_COMMAND: ContextVar[Silences | None] = ContextVar("silences of this command", default=None)


@contextmanager
def one_command() -> Iterator[None]:
    """Inside, the queries of one toolkit command share their record; programs that call toolkit's functions have none."""
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
    """The record of the current command; None outside of one."""
    return _OF_THIS_COMMAND.get()

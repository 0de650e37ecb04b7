"""The family of errors that a user may see.

Each states what is wrong, where (file:line:key if there is one) and the fix. The command line prints it as one line
and exits with `exit_code`; a traceback is only for bugs in toolkit.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CHECK_FAILED", "INTERRUPTED", "OWN_FAILURE", "WRONG_USE", "CheckFailedError", "DamagedFileError",
    "InterruptedWaitError", "NotFoundError", "OwnFailureError", "SchedulerRefusedError", "ToolkitError", "all_of",
    "counted",
]  # fmt: skip

# The exit codes of every command; docs/contract.md contains the table.
CHECK_FAILED = 1
WRONG_USE = 2
SCHEDULER_REFUSED = 3
NOT_FOUND = 4
OWN_FAILURE = 125
INTERRUPTED = 130

LONGEST_QUOTE = 1000  # characters; most paths are shorter


class ToolkitError(Exception):
    """An error that the user can fix.

    Args:
        message: what is wrong, in one line, with the offending value.
        where: the place, as `file:line:key`, a path or a host name.
        fix: what exactly to do.
        others: further errors in the same place, each on its own line.
    """

    exit_code = WRONG_USE

    def __init__(self, message: str, *, where: str = "", fix: str = "", others: Sequence[ToolkitError] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.fix = fix
        self.others = tuple(others)

    def __str__(self) -> str:
        text = f"{_shortened(self.where)}: {_shortened(self.message)}" if self.where else _shortened(self.message)
        return f"{text}. Fix: {self.fix}" if self.fix else text


def _shortened(text: str) -> str:
    """The string with its middle cut out, if it is so long that it would push the fix out of view."""
    return text if len(text) <= LONGEST_QUOTE else f"{text[: LONGEST_QUOTE // 2]} [...] {text[-LONGEST_QUOTE // 2 :]}"


def all_of(errors: Sequence[ToolkitError]) -> ToolkitError:
    """Several errors as one, one line each; the exit code is the first one's."""
    first, *rest = errors
    first.others = (*first.others, *rest)
    return first


class CheckFailedError(ToolkitError):
    """A check ran, and its result is negative."""

    exit_code = CHECK_FAILED


class SchedulerRefusedError(ToolkitError):
    """Slurm answered and rejected the request."""

    exit_code = SCHEDULER_REFUSED


class NotFoundError(ToolkitError):
    """A site, run, job or checkpoint does not exist."""

    exit_code = NOT_FOUND


class DamagedFileError(ToolkitError):
    """A file of a run does not have the expected contents; `where` is its path."""


class InterruptedWaitError(ToolkitError):
    """Ctrl-C ended a wait; the message reports the last known state."""

    exit_code = INTERRUPTED


class OwnFailureError(ToolkitError):
    """Toolkit itself, not the user's program, could not continue."""

    exit_code = OWN_FAILURE


def counted(number: int, noun: str) -> str:
    """ "1 node", "2 nodes", "4,096 nodes": a number with its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

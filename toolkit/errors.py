"""The exceptions that a user may see.

Each states what is wrong, where (such as file:line:key) and the fix. The command line prints it as one line and exits
with `exit_code`. It prints a traceback only for a bug in toolkit.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CHECK_FAILED", "INTERRUPTED", "OWN_FAILURE", "WRONG_USE", "CheckFailedError", "DamagedFileError",
    "InterruptedWaitError", "NotFoundError", "OwnFailureError", "SchedulerRefusedError", "ToolkitError", "all_of",
    "counted", "first_line",
]  # fmt: skip

# The exit codes of all commands, as listed in docs/contract.md.
CHECK_FAILED = 1
WRONG_USE = 2
SCHEDULER_REFUSED = 3
NOT_FOUND = 4
OWN_FAILURE = 125
INTERRUPTED = 130

LONGEST_QUOTE = 1000  # characters, more than most paths have


class ToolkitError(Exception):
    """An error that the user can fix.

    Args:
        message: what is wrong, in one line, with the offending value.
        where: the location: `file:line:key`, a path or a host name.
        fix: what the user can do about it.
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
    """Remove the middle of a string that is so long that the user might overlook the fix."""
    return text if len(text) <= LONGEST_QUOTE else f"{text[: LONGEST_QUOTE // 2]} [...] {text[-LONGEST_QUOTE // 2 :]}"


def all_of(errors: Sequence[ToolkitError]) -> ToolkitError:
    """Combine errors into one, printed on one line each; the exit code is that of the first error."""
    first, *rest = errors
    first.others = (*first.others, *rest)
    return first


class CheckFailedError(ToolkitError):
    """A check has run and failed."""

    exit_code = CHECK_FAILED


class SchedulerRefusedError(ToolkitError):
    """Slurm rejected a request."""

    exit_code = SCHEDULER_REFUSED


class NotFoundError(ToolkitError):
    """A site, run, job or checkpoint does not exist."""

    exit_code = NOT_FOUND


class DamagedFileError(ToolkitError):
    """A file of a run does not have the expected contents; `where` is its path."""


class InterruptedWaitError(ToolkitError):
    """Ctrl-C interrupted a wait; the message reports the last known state."""

    exit_code = INTERRUPTED


class OwnFailureError(ToolkitError):
    """toolkit itself failed, not the user's program."""

    exit_code = OWN_FAILURE


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: "1 node", "2 nodes", "4,096 nodes"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

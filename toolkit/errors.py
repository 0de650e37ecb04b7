"""The one family of errors that a user may see.

Each says what is wrong, where (file:line:key when there is one) and how to fix it. The command line prints
it as one line and ends with `exit_code`; a traceback is for our own mistakes only.
"""

from __future__ import annotations

from collections.abc import Sequence

# The exit codes of every command; docs/contract.md has the table.
CHECK_FAILED = 1
WRONG_USE = 2
SCHEDULER_REFUSED = 3
NOT_FOUND = 4
OWN_FAILURE = 125
INTERRUPTED = 130

LONGEST_QUOTE = 1000  # letters; most paths are shorter


class ToolkitError(Exception):
    """An error that the user can fix.

    Args:
        message: what is wrong, in one line, with the offending value.
        where: the place, as `file:line:key`, a path or a host name.
        fix: the exact thing to do.
        others: further mistakes in the same place, each a line of its own.
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
    """A value of many pages, quoted whole, would push the fix out of sight."""
    return text if len(text) <= LONGEST_QUOTE else f"{text[: LONGEST_QUOTE // 2]} [...] {text[-LONGEST_QUOTE // 2 :]}"


def all_of(errors: Sequence[ToolkitError]) -> ToolkitError:
    """Several errors as one, a line each; the exit code is the first one's."""
    first, *rest = errors
    first.others = (*first.others, *rest)
    return first


class CheckFailedError(ToolkitError):
    """A check was run and its answer is no."""

    exit_code = CHECK_FAILED


class SchedulerRefusedError(ToolkitError):
    """Slurm answered and refused."""

    exit_code = SCHEDULER_REFUSED


class NotFoundError(ToolkitError):
    """A site, run, job or checkpoint that does not exist."""

    exit_code = NOT_FOUND


class DamagedFileError(ToolkitError):
    """A file of a run that does not hold what such a file does; `where` is its path."""


class InterruptedWaitError(ToolkitError):
    """Ctrl-C ended a wait; the message reports the state of the awaited run or job."""

    exit_code = INTERRUPTED


class OwnFailureError(ToolkitError):
    """The toolkit, not the user's program, could not go on."""

    exit_code = OWN_FAILURE


def counted(number: int, what: str) -> str:
    """ "1 node", "2 nodes", "4,096 nodes": what a message counts."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"

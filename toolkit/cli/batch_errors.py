"""Run a command for several names: an error with one name does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from toolkit.errors import ToolkitError, all_of
from toolkit.rundir.files import permissions_in_words

Result = TypeVar("Result")


def for_each(names: Iterable[str], do: Callable[[str], Result]) -> tuple[list[Result], list[ToolkitError]]:
    """Return the results of `do` for each distinct name, and the errors of the names that it refused.

    Raises:
        OSError: stdout was closed, as by `| head -1`; raised after all names were processed.
    """
    results: list[Result] = []
    refused: list[ToolkitError] = []
    stdout_error: OSError | None = None
    for name in dict.fromkeys(names):
        try:
            with permissions_in_words():
                results.append(do(name))
        except ToolkitError as error:
            refused.append(error)
        except OSError as error:
            if error.filename is not None:  # a file's
                raise
            stdout_error = error
    if stdout_error is not None:
        raise stdout_error
    return results, refused


def refuse_at_last(refused: Sequence[ToolkitError]) -> None:
    """Raise the collected errors, if any, after all names were processed.

    Raises:
        ToolkitError: the first error, with the others attached.
    """
    if refused:
        raise all_of(refused)

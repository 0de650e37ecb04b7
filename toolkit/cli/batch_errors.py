"""One command for several names: what is wrong with one of them keeps no other from its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from toolkit.errors import ToolkitError, all_of
from toolkit.rundir.files import permissions_in_words

Result = TypeVar("Result")


def for_each(names: Iterable[str], do: Callable[[str], Result]) -> tuple[list[Result], list[ToolkitError]]:
    """What `do` makes of each name, once, and the errors of those that it refuses.

    Raises:
        OSError: stdout took no more, as of `| head -1`; all names have had their turn.
    """
    made: list[Result] = []
    refused: list[ToolkitError] = []
    unheard: OSError | None = None
    for name in dict.fromkeys(names):
        try:
            with permissions_in_words():
                made.append(do(name))
        except ToolkitError as error:
            refused.append(error)
        except OSError as error:
            if error.filename is not None:  # a file's
                raise
            unheard = error
    if unheard is not None:
        raise unheard
    return made, refused


def refuse_at_last(refused: Sequence[ToolkitError]) -> None:
    """End the command with what was refused, if anything was, now that all else is done.

    Raises:
        ToolkitError: the first of them, with the others.
    """
    if refused:
        raise all_of(refused)

"""Reads the last lines of a file backwards from its end, so that for a log of 10 GB it reads only a few blocks."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

__all__ = ["LONGEST_LINE_BYTES", "SEARCHED_BYTES", "last_lines"]

BLOCK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 20  # only the end of a longer line is returned
SEARCHED_BYTES = 1 << 26  # the most bytes to read while searching for the lines of one rank among many
CUT = b"[... a line of more than 1 MiB; its end:] "


class Tail(NamedTuple):
    """The requested last lines in file order; `end` is the offset of the byte after them.

    `gave_up` is true if there are fewer than requested because the search reached its limit.
    """

    lines: list[str]
    end: int
    gave_up: bool


def last_lines(path: Path, wanted: int, *, shown: Callable[[str], str | None], unfinished: bool) -> Tail:
    """Return the last `wanted` lines for which `shown` does not return None, as it returns them, without newlines.

    With `unfinished`, a last line without a newline is included. Otherwise it is skipped, because it may be incomplete.
    """
    found: list[str] = []
    with path.open("rb") as stream:
        end = stream.seek(0, os.SEEK_END)
        lowest = end
        for offset, line in _from_end(stream, end):
            lowest = offset
            if not unfinished and not line.endswith(b"\n"):  # applies only to the last line
                end = offset
                continue
            text = shown(line.decode("utf-8", "surrogateescape").removesuffix("\n"))
            if text is not None:
                found.append(text)
            if len(found) == wanted:
                break
    return Tail(found[::-1], end, gave_up=len(found) < wanted and lowest > 0)


def _from_end(stream: BinaryIO, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines before byte `end`, last one first, each with its offset; reads at most `SEARCHED_BYTES`.

    For a line that is too long, yields only its end, and then stops.
    """
    position, rest = end, b""
    lowest = max(0, end - SEARCHED_BYTES)
    while position > lowest:
        size = min(BLOCK_BYTES, position - lowest)
        position -= size
        stream.seek(position)
        text = stream.read(size) + rest
        stop = len(text)
        while (newline := text.rfind(b"\n", 0, stop - 1)) >= 0:
            yield position + newline + 1, text[newline + 1 : stop]
            stop = newline + 1
        rest = text[:stop]
        if len(rest) > LONGEST_LINE_BYTES:
            yield position, CUT + rest
            return
    if rest and position == 0:
        yield 0, rest

"""Find records in a long JSON Lines file by reading only a few blocks. Standard library only."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

__all__ = ["first_where", "samples_of"]

BLOCK_BYTES = 1 << 14

T = TypeVar("T")


def first_where(path: Path, from_line: Callable[[str], T], reached: Callable[[T], bool]) -> T | None:
    """Return the first record for which `reached` is true, by binary search; `reached` must be true for all later ones.

    Lines that are not records are skipped. Returns None if there is no such record or no file.
    """
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        return None
    with stream:
        low, high = 0, stream.seek(0, os.SEEK_END)  # the record starts at or after `low`, the start of a line
        while high - low > BLOCK_BYTES:
            middle = (low + high) // 2
            stream.seek(middle)
            stream.readline()  # skip the rest of a line
            record = _next(stream, from_line)
            if record is None or reached(record):
                high = middle
            else:
                low = stream.tell()
        stream.seek(low)
        while (record := _next(stream, from_line)) is not None:
            if reached(record):
                return record
    return None


def samples_of(path: Path, from_line: Callable[[str], T], count: int) -> list[T]:
    """Return at most `count` records from a file, spaced evenly by bytes, in file order."""
    found: list[T] = []
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        return found
    with stream:
        size, behind = stream.seek(0, os.SEEK_END), 0
        for number in range(count):
            begin = max(behind, size * number // count)
            stream.seek(max(0, begin - 1))
            if begin:
                stream.readline()  # skip the rest of a line, or the preceding newline
            record = _next(stream, from_line)
            if record is None:
                break
            found.append(record)
            behind = stream.tell()
    return found


def _next(stream: BinaryIO, from_line: Callable[[str], T]) -> T | None:
    """Return the next complete record; None at the end."""
    while (line := stream.readline()).endswith(b"\n"):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            return from_line(line.decode())
    return None

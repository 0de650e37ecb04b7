"""Bytes that follow one another in a file and lie anywhere in memory: a sequence of views, none of them copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

_STRIDE_BYTES = 512 * 1024
_STRIDE_VIEWS = 256  # the system takes 1,024 in one call


def in_lengths(
    views: Iterable[memoryview], length: int, *, most_views: int | None = None
) -> Iterator[list[memoryview]]:
    """The same bytes in lists of `length` bytes; the last is shorter, and so is one that has `most_views`."""
    found: list[memoryview] = []
    room = length
    for view in views:
        rest = view
        while len(rest) >= room:
            yield [*found, rest[:room]]
            rest, found, room = rest[room:], [], length
        if len(rest):
            found.append(rest)
            room -= len(rest)
        if len(found) == most_views:
            yield found
            found, room = [], length
    if found:
        yield found


def in_strides(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes, some at a time, for whoever copies and digests them.

    A stride stays in the processor's cache (L2) between the two. There, a digest takes a fifth of the time that it takes
    to bring the bytes out of memory once more.
    """
    return in_lengths(views, _STRIDE_BYTES, most_views=_STRIDE_VIEWS)


def behind(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left without the first `count` bytes."""
    if count == sum(map(len, views)):  # nearly always: the system takes, or gives, all that it is asked for
        return []
    rest = list(views)
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    if count:
        rest[0] = rest[0][count:]
    return rest

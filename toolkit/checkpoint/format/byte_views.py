"""Bytes that are contiguous in a file and scattered in memory: a sequence of views without copies."""

from collections.abc import Iterable, Iterator, Sequence

_CACHED_BYTES = 512 * 1024
_CACHED_VIEWS = 256  # a system call accepts 1,024


def in_lengths(
    views: Iterable[memoryview], length: int, *, most_views: int | None = None
) -> Iterator[list[memoryview]]:
    """The same bytes in lists of `length` bytes; the last is shorter, and so is one that has `most_views`."""
    collected: list[memoryview] = []
    missing = length
    for view in views:
        rest = view
        while len(rest) >= missing:
            yield [*collected, rest[:missing]]
            rest, collected, missing = rest[missing:], [], length
        if len(rest):
            collected.append(rest)
            missing -= len(rest)
        if len(collected) == most_views:
            yield collected
            collected, missing = [], length
    if collected:
        yield collected


def in_cached_parts(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in lists that fit into the L2 cache: digesting is then five times as fast as from memory."""
    return in_lengths(views, _CACHED_BYTES, most_views=_CACHED_VIEWS)


def without_first(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """The views without the first `count` bytes."""
    if count == sum(map(len, views)):  # nearly always: a system call transfers all bytes
        return []
    rest = list(views)
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    if count:
        rest[0] = rest[0][count:]
    return rest

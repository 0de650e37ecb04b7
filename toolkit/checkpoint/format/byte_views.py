"""Splits sequences of memory views, which represent contiguous bytes of a file, without copying them."""

from collections.abc import Iterable, Iterator, Sequence

_CACHED_BYTES = 512 * 1024
_CACHED_VIEWS = 256  # well below the 1,024 buffers that a system call accepts


def in_lengths(
    views: Iterable[memoryview], length: int, *, most_views: int | None = None
) -> Iterator[list[memoryview]]:
    """Regroup the views into lists of `length` bytes. The last one may be shorter, as may one of `most_views` views."""
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
    """Regroup the views into lists that fit into the L2 cache, where digesting is five times as fast as from memory."""
    return in_lengths(views, _CACHED_BYTES, most_views=_CACHED_VIEWS)


def without_first(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the views without the first `count` bytes."""
    if count == sum(map(len, views)):  # the common case: a system call has transferred all bytes
        return []
    rest = list(views)
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    if count:
        rest[0] = rest[0][count:]
    return rest

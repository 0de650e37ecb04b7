"""The chunks of a compressed piece: boxes of equal shape on a grid in C order, padded with zeros at the edges."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Chunks:
    """The chunks of one piece: `places` are (first byte, size in bytes) in grid order; `filters` apply in order."""

    shape: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    filters: tuple[str, ...]

    def bytes_of_file(self, number: int) -> range:
        """Return the byte range of one chunk in the file."""
        first, size = self.places[number]
        return range(first, first + size)


def chunk_shape(extent: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    """Return the shape of chunks of about 1 MiB that are contiguous in the piece, as they span its last dimensions."""
    most = max(1, CHUNK_BYTES // element_bytes)
    shape: list[int] = []
    for size in reversed(extent):
        count = -(-size // max(1, most))  # the number of chunks along this dimension, all of nearly the same size
        shape.append(-(-size // count))
        most = most // size if count == 1 else 0
    return tuple(reversed(shape))


def grid(extent: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the number of chunks along each dimension of a piece."""
    return tuple(-(-size // count) for size, count in zip(extent, shape, strict=True))


def chunk_ranges(extent: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], range]]:
    """Yield the start of each chunk of a `chunk_shape` and the range of elements of the piece in it, in grid order."""
    first = 0
    for position in product(*map(range, grid(extent, shape))):
        start = tuple(number * count for number, count in zip(position, shape, strict=True))
        elements = prod(min(count, size - at) for at, count, size in zip(start, shape, extent, strict=True))
        yield start, range(first, first + elements)
        first += elements


def chunks_of_box(
    extent: Sequence[int], shape: Sequence[int], start: Sequence[int], box: Sequence[int]
) -> Iterator[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
    """Yield each chunk that overlaps a box: its number, and the overlap relative to the chunk and to the box."""
    counts = grid(extent, shape)
    along = [range(at // count, -(-(at + size) // count)) for at, size, count in zip(start, box, shape, strict=True)]
    for position in product(*along):
        number = 0
        inside_chunk, inside_box = [], []
        for index, chunks, count, at, size in zip(position, counts, shape, start, box, strict=True):
            number = number * chunks + index
            begin, end = max(index * count, at), min((index + 1) * count, at + size)
            inside_chunk.append(slice(begin - index * count, end - index * count))
            inside_box.append(slice(begin - at, end - at))
        yield number, tuple(inside_chunk), tuple(inside_box)

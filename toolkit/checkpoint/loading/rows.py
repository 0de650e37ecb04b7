"""Boxes whose rows are not contiguous in the file: the first byte of each row, and copying rows to their targets.

A box that is narrower than its piece is a stack of rows at equal distances. Rows that start in the same block of the
file are copied together, while the block may still be in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from mmap import mmap

import numpy as np

_MOST_ROW_BYTES = 256 * 1024  # far less than a block: most rows end in the block in which they start


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a box: `out[i]` starts at byte `first + i * distance` of the file.

    `strides` are those of the file, in bytes, for the dimensions of `out`; `span` are the bytes from the first element of a
    row to the end of its last.
    """

    first: int
    distance: int
    span: int
    strides: tuple[int, ...]
    out: np.ndarray

    @property
    def begins(self) -> range:
        """The first byte of each row."""
        return range(self.first, self.first + self.distance * len(self.out), self.distance)

    def starting_in(self, span: range) -> range:
        """The numbers of the rows that start in a span of the file."""
        first, end = (-(-(at - self.first) // self.distance) for at in (span.start, span.stop))
        return range(min(max(first, 0), len(self.out)), min(max(end, 0), len(self.out)))

    def copy(self, numbers: range, buffer: mmap | memoryview | bytes, buffer_begins: int) -> None:
        """Copy some rows from a buffer with the bytes of the file from `buffer_begins` on."""
        if not numbers:
            return
        part = self.out[numbers.start : numbers.stop]
        offset = self.first + numbers.start * self.distance - buffer_begins
        part[...] = np.ndarray(part.shape, part.dtype, buffer, offset, self.strides)


def rows_of(first_byte: int, piece_shape: tuple[int, ...], start: tuple[int, ...], out: np.ndarray) -> Iterator[Rows]:
    """All rows of a box, none of them longer than 256 KiB.

    Args:
        first_byte: the first byte of the piece in the file.
        piece_shape: the shape of the piece, which is stored in C order.
        start: the start of the box in the piece.
        out: the target, with the shape of the box.
    """
    size = out.itemsize
    strides = tuple(prod(piece_shape[axis + 1 :]) * size for axis in range(out.ndim))
    axis = next(axis for axis, distance in enumerate(strides) if distance <= _MOST_ROW_BYTES)
    begin = first_byte + sum(at * stride for at, stride in zip(start, strides, strict=True))
    inner = zip(out.shape[axis + 1 :], strides[axis + 1 :], strict=True)
    span = size + sum((count - 1) * stride for count, stride in inner)
    for outer in product(*map(range, out.shape[:axis])):
        first = begin + sum(at * stride for at, stride in zip(outer, strides, strict=False))
        yield Rows(first, strides[axis], span, strides[axis:], out[outer])

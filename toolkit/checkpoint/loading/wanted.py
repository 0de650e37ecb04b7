"""The part of a shard file that a load reads, computed from the manifest: boxes, their targets, and bytes by block."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import prod
from mmap import mmap

import numpy as np

from toolkit.checkpoint.format.chunks import chunks_of_box
from toolkit.checkpoint.format.digests import BLOCK_BYTES
from toolkit.checkpoint.format.manifest import Piece

_MOST_ROW_BYTES = 256 * 1024  # far less than a block: most rows end in the block in which they start


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a box: `out[i]` starts at byte `first + i * distance` of the file.

    `strides` are the file's, in bytes, for the dimensions of `out`; `span` is a row's length in the file, in bytes.
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
    """All rows of the box at `start` in a piece, stored in C order from `first_byte`; none is longer than 256 KiB."""
    size = out.itemsize
    strides = tuple(prod(piece_shape[axis + 1 :]) * size for axis in range(out.ndim))
    axis = next(axis for axis, distance in enumerate(strides) if distance <= _MOST_ROW_BYTES)
    begin = first_byte + sum(at * stride for at, stride in zip(start, strides, strict=True))
    inner = zip(out.shape[axis + 1 :], strides[axis + 1 :], strict=True)
    span = size + sum((count - 1) * stride for count, stride in inner)
    for outer in product(*map(range, out.shape[:axis])):
        first = begin + sum(at * stride for at, stride in zip(outer, strides, strict=False))
        yield Rows(first, strides[axis], span, strides[axis:], out[outer])


_MOST_PARTS = 64  # of a block in one system call; with more, the block is read as a whole and copied


@dataclass(frozen=True, eq=False)
class WantedBox:
    """A box at `start` in a piece; its target `out` has the box's shape, and elements of the stored size."""

    piece: Piece
    start: tuple[int, ...]
    out: np.ndarray


@dataclass(frozen=True, eq=False)
class WantedOfBlock:
    """The wanted bytes of a block: (first byte, target) of contiguous parts, and rows that may start in it."""

    parts: list[tuple[int, memoryview]] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)

    @cached_property
    def in_order(self) -> Sequence[tuple[int, memoryview]]:
        """The parts in the file's order."""
        return sorted(self.parts, key=_first)

    @cached_property
    def is_scattered(self) -> bool:
        """Whether the block is read as a whole and copied: it has rows, many parts, or bytes with two targets."""
        return bool(self.rows) or len(self.parts) > _MOST_PARTS or _overlap(self.in_order)


@dataclass(frozen=True, eq=False)
class FileReads:
    """The wanted bytes of one shard file: by block, in the file's order, and boxes of compressed pieces."""

    blocks: Mapping[int, WantedOfBlock]
    compressed: Sequence[WantedBox]

    def touched(self) -> set[int]:
        """The blocks with wanted bytes."""
        return set(self.blocks).union(*map(_blocks_of, self.compressed))


def reads_of(boxes: Iterable[WantedBox]) -> FileReads:
    """The reads for boxes of one file, without opening it."""
    blocks: defaultdict[int, WantedOfBlock] = defaultdict(WantedOfBlock)
    compressed = []
    for box in boxes:
        if not box.out.size:
            continue
        if box.piece.chunks is not None:
            compressed.append(box)
        else:
            _add(blocks, box)
    return FileReads(in_file_order(blocks), compressed)


def in_file_order(blocks: Mapping[int, WantedOfBlock]) -> dict[int, WantedOfBlock]:
    """The same dict sorted by block."""
    return {block: blocks[block] for block in sorted(blocks)}


def _add(wanted: defaultdict[int, WantedOfBlock], box: WantedBox) -> None:
    """Add a box of an uncompressed piece."""
    inside = _bytes_of_box(box.piece, box.start, box.out.shape, box.out.itemsize)
    if len(inside) == box.out.nbytes and box.out.flags.c_contiguous:  # contiguous in the file and in memory
        add_bytes(wanted, inside.start, box.out.reshape(-1).view(np.uint8).data)
        return
    for block in blocks_of(inside):
        wanted[block]  # checked even if no row starts in it
    for rows in rows_of(box.piece.byte_offset, box.piece.shape, box.start, box.out):
        for block in blocks_of(range(rows.begins[0], rows.begins[-1] + 1)):
            wanted[block].rows.append(rows)


def add_bytes(wanted: defaultdict[int, WantedOfBlock], first: int, data: memoryview) -> None:
    """Add the bytes of the file from `first` on, with the target `data`."""
    for block in blocks_of(range(first, first + len(data))):
        begin, end = max(first, block * BLOCK_BYTES), min(first + len(data), (block + 1) * BLOCK_BYTES)
        wanted[block].parts.append((begin, data[begin - first : end - first]))


def _first(part: tuple[int, memoryview]) -> int:
    return part[0]


def _overlap(places: Sequence[tuple[int, memoryview]]) -> bool:
    """Whether some bytes have two targets."""
    return any(begin + len(part) > following for (begin, part), (following, _) in pairwise(places))


def _blocks_of(box: WantedBox) -> set[int]:
    return blocks_of_box(box.piece, box.start, box.out.shape, box.out.itemsize)


def blocks_of(inside: range) -> range:
    """The blocks that contain a range of bytes of a file."""
    return range(inside.start // BLOCK_BYTES, -(-inside.stop // BLOCK_BYTES))


def blocks_of_box(piece: Piece, start: Sequence[int], shape: Sequence[int], element_bytes: int) -> set[int]:
    """The blocks of a piece's file that contain a non-empty box of it."""
    if piece.chunks is None:
        return set(blocks_of(_bytes_of_box(piece, start, shape, element_bytes)))
    within = chunks_of_box(piece.shape, piece.chunks.shape, start, shape)
    return {block for number, _, _ in within for block in blocks_of(piece.chunks.bytes_of_file(number))}


def _bytes_of_box(piece: Piece, start: Sequence[int], shape: Sequence[int], element_bytes: int) -> range:
    """The range of the file from the box's first byte to its last, with other bytes between them."""
    if tuple(shape) == piece.shape:  # the common case, of which there may be thousands
        return range(piece.byte_offset, piece.byte_offset + piece.size * element_bytes)
    strides = [prod(piece.shape[axis + 1 :]) for axis in range(len(piece.shape))]
    first = sum(at * stride for at, stride in zip(start, strides, strict=True))
    last = first + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    return range(piece.byte_offset + first * element_bytes, piece.byte_offset + (last + 1) * element_bytes)

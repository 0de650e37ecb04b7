"""Computes from the manifest which bytes of a shard file a load reads: boxes with their targets, and bytes by block."""

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

_MOST_ROW_BYTES = 256 * 1024  # far less than a block, so that most rows end in the block in which they start


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a box: the row `out[i]` starts at byte `first + i * distance` of the file.

    `strides` are the strides in the file, in bytes, for the dimensions of `out`. `span` is the number of bytes in the
    file from the start of a row to its end.
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
        """Return the indices of the rows that start in a byte range of the file."""
        first, end = (-(-(at - self.first) // self.distance) for at in (span.start, span.stop))
        return range(min(max(first, 0), len(self.out)), min(max(end, 0), len(self.out)))

    def copy(self, numbers: range, buffer: mmap | memoryview | bytes, buffer_begins: int) -> None:
        """Copy some rows from a buffer that contains the bytes of the file from byte `buffer_begins` on."""
        if not numbers:
            return
        part = self.out[numbers.start : numbers.stop]
        offset = self.first + numbers.start * self.distance - buffer_begins
        part[...] = np.ndarray(part.shape, part.dtype, buffer, offset, self.strides)


def rows_of(first_byte: int, piece_shape: tuple[int, ...], start: tuple[int, ...], out: np.ndarray) -> Iterator[Rows]:
    """Return the rows (of at most 256 KiB) of the box at `start` in a piece stored in C order from `first_byte`."""
    size = out.itemsize
    strides = tuple(prod(piece_shape[axis + 1 :]) * size for axis in range(out.ndim))
    axis = next(axis for axis, distance in enumerate(strides) if distance <= _MOST_ROW_BYTES)
    begin = first_byte + sum(at * stride for at, stride in zip(start, strides, strict=True))
    inner = zip(out.shape[axis + 1 :], strides[axis + 1 :], strict=True)
    span = size + sum((count - 1) * stride for count, stride in inner)
    for outer in product(*map(range, out.shape[:axis])):
        first = begin + sum(at * stride for at, stride in zip(outer, strides, strict=False))
        yield Rows(first, strides[axis], span, strides[axis:], out[outer])


_MOST_PARTS = 64  # the limit of buffers per system call; a block with more parts is read as a whole and copied


@dataclass(eq=False)  # frozen ones take longer to create, and there are thousands
class WantedBox:
    """A box at `start` in a piece; the target `out` has the shape of the box, and elements of the stored size."""

    piece: Piece
    start: tuple[int, ...]
    out: np.ndarray


@dataclass(frozen=True, eq=False)
class WantedOfBlock:
    """The wanted bytes of a block: contiguous parts as (first byte, target), and rows that may start in it."""

    parts: list[tuple[int, memoryview]] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)

    @cached_property
    def in_order(self) -> Sequence[tuple[int, memoryview]]:
        """The parts in file order."""
        return sorted(self.parts, key=_first)

    @cached_property
    def is_scattered(self) -> bool:
        """Whether the block must be read as a whole and copied, due to rows, many parts, or bytes with two targets."""
        return bool(self.rows) or len(self.parts) > _MOST_PARTS or _overlap(self.in_order)


@dataclass(frozen=True, eq=False)
class FileReads:
    """The wanted bytes of one shard file: by block, in file order, and the boxes of compressed pieces."""

    blocks: Mapping[int, WantedOfBlock]
    compressed: Sequence[WantedBox]

    def touched(self) -> set[int]:
        """Return the numbers of the blocks that contain wanted bytes."""
        return set(self.blocks).union(*map(_blocks_of, self.compressed))


def reads_of(boxes: Iterable[WantedBox]) -> FileReads:
    """Compute the reads for the boxes of one file, without opening it."""
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
    """Return a copy of the dict, sorted by block number."""
    return {block: blocks[block] for block in sorted(blocks)}


def _add(wanted: defaultdict[int, WantedOfBlock], box: WantedBox) -> None:
    """Add a box of an uncompressed piece."""
    inside = _bytes_of_box(box.piece, box.start, box.out.shape, box.out.itemsize)
    if len(inside) == box.out.nbytes and box.out.flags.c_contiguous:  # the box is contiguous in the file and in memory
        add_bytes(wanted, inside.start, box.out.reshape(-1).view(np.uint8).data)
        return
    for block in blocks_of(inside):
        wanted[block]  # this creates the entry, so that the block is checked even if no row starts in it
    for rows in rows_of(box.piece.byte_offset, box.piece.shape, box.start, box.out):
        for block in blocks_of(range(rows.begins[0], rows.begins[-1] + 1)):
            wanted[block].rows.append(rows)


def add_bytes(wanted: defaultdict[int, WantedOfBlock], first: int, data: memoryview) -> None:
    """Add `data` as the target of the bytes of the file from `first` on."""
    block, inside = divmod(first, BLOCK_BYTES)
    if inside + len(data) <= BLOCK_BYTES:  # the common case of small tensors
        wanted[block].parts.append((first, data))
        return
    for block in blocks_of(range(first, first + len(data))):
        begin, end = max(first, block * BLOCK_BYTES), min(first + len(data), (block + 1) * BLOCK_BYTES)
        wanted[block].parts.append((begin, data[begin - first : end - first]))


def _first(part: tuple[int, memoryview]) -> int:
    return part[0]


def _overlap(places: Sequence[tuple[int, memoryview]]) -> bool:
    """Return whether some bytes have two targets."""
    return any(begin + len(part) > following for (begin, part), (following, _) in pairwise(places))


def _blocks_of(box: WantedBox) -> set[int]:
    return blocks_of_box(box.piece, box.start, box.out.shape, box.out.itemsize)


def blocks_of(inside: range) -> range:
    """Return the blocks that a byte range of a file overlaps."""
    return range(inside.start // BLOCK_BYTES, -(-inside.stop // BLOCK_BYTES))


def blocks_of_box(piece: Piece, start: Sequence[int], shape: Sequence[int], element_bytes: int) -> set[int]:
    """Return the blocks of the shard file that a non-empty box of a piece overlaps."""
    if piece.chunks is None:
        return set(blocks_of(_bytes_of_box(piece, start, shape, element_bytes)))
    within = chunks_of_box(piece.shape, piece.chunks.shape, start, shape)
    return {block for number, _, _ in within for block in blocks_of(piece.chunks.bytes_of_file(number))}


def _bytes_of_box(piece: Piece, start: Sequence[int], shape: Sequence[int], element_bytes: int) -> range:
    """Return the byte range from the first byte of a box to its last in the file, including unrelated bytes."""
    if tuple(shape) == piece.shape:  # a fast path for the common case, which may occur thousands of times
        return range(piece.byte_offset, piece.byte_offset + piece.size * element_bytes)
    strides = [prod(piece.shape[axis + 1 :]) for axis in range(len(piece.shape))]
    first = sum(at * stride for at, stride in zip(start, strides, strict=True))
    last = first + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    return range(piece.byte_offset + first * element_bytes, piece.byte_offset + (last + 1) * element_bytes)

"""Reads boxes of pieces out of one shard file, straight into their places, and checks every block that they touch.

No HDF5: the manifest says where each piece's bytes begin, so that nothing in the file can lead elsewhere. A box whose
bytes follow one another in the file and in memory is read into its place and digested there. Other boxes are copied row
by row: out of a block that was just read to be checked, else out of the file's pages. Of a compressed piece the chunks
that hold something of a box are read, checked, and decompressed.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import xxhash

from toolkit.checkpoint.errors import CorruptCheckpointError, reading
from toolkit.checkpoint.format.byte_views import behind, in_strides
from toolkit.checkpoint.format.chunks import chunks_of_box
from toolkit.checkpoint.format.digests import BLOCK_BYTES, BlockDigests, read_digests, size_of_file
from toolkit.checkpoint.format.filters import DecompressionError, decompress
from toolkit.checkpoint.format.layout import digest_name
from toolkit.checkpoint.format.manifest import FileRecord, Piece
from toolkit.checkpoint.loading.rows import Rows, rows_of

T = TypeVar("T")
Pages = mmap.mmap | bytes

_BATCH_BYTES = 64 * 1024 * 1024  # of compressed chunks that are in memory at a time
_MOST_PARTS = 64  # of a block in one system call; more are read together and copied from there


@dataclass(frozen=True, eq=False)
class WantedBox:
    """A box of a piece and its place in memory.

    `start` is where it begins inside the piece; `out` has its shape, and elements of the piece's size, bit by bit.
    """

    piece: Piece
    start: tuple[int, ...]
    out: np.ndarray

    @cached_property
    def bytes_of_file(self) -> range:
        """The bytes of the file from the box's first to its last, others' between them. Not of a compressed piece."""
        return _bytes_of_box(self.piece, self.start, self.out.shape, self.out.itemsize)

    @cached_property
    def blocks(self) -> Collection[int]:
        """The blocks that hold the box."""
        if self.piece.chunks is None:
            return blocks_of(self.bytes_of_file)
        return blocks_of_box(self.piece, self.start, self.out.shape, self.out.itemsize)

    @property
    def is_direct(self) -> bool:
        """Whether its bytes follow one another in the file and in memory."""
        return self.piece.chunks is None and self.out.flags.c_contiguous and len(self.bytes_of_file) == self.out.nbytes


@dataclass(frozen=True, eq=False)
class _WantedChunk:
    """A chunk of a box's piece: where its bytes are in the file, and the part of it that the box wants."""

    box: WantedBox
    stored: range
    inside_chunk: tuple[slice, ...]
    inside_box: tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class _WantedOfBlock:
    """What is wanted of a block: bytes from a first one on and their places, and rows that may begin in it."""

    parts: list[tuple[int, memoryview]] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)


class ShardReader:
    """One shard file of a checkpoint, open. A context manager.

    `bytes_read` counts what was asked of the file, each block as a whole.
    """

    def __init__(self, path: Path, expected: FileRecord, *, threads: int = 1) -> None:
        """Open the file, which must have the size and digests that the manifest states.

        Raises:
            CorruptCheckpointError: the file or its digests are missing, cut, or not those of the manifest.
            OwnFailureError: the system does not let this host read it, which says nothing about the checkpoint.
        """
        self.bytes_read = 0
        self._path = path
        self._threads = threads
        self._unchecked = set(range(-(-expected.size // BLOCK_BYTES)))
        self._scratch = threading.local()
        with reading(path):
            self._digests = _digests_of(path, expected)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._opened_as = self._identity()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, boxes: Iterable[WantedBox], *, checked_by_others: Collection[int] = ()) -> None:
        """Fill the boxes. When this raises, they hold nothing that may be used.

        Args:
            checked_by_others: blocks that another rank of this node checks meanwhile.

        Raises:
            CorruptCheckpointError: a block is damaged, or the file was changed meanwhile.
            OwnFailureError: the system does not let this host read it.
        """
        filled = [box for box in boxes if box.out.size]
        plain = [box for box in filled if box.piece.chunks is None]
        wanted = {block: _WantedOfBlock() for block in sorted({block for box in plain for block in box.blocks})}
        for box in plain:
            _add(wanted, box)
        with reading(self._path), self._mapped(any(of_block.rows for of_block in wanted.values())) as pages:
            self._read_blocks(wanted, checked_by_others, pages)
            self._decompress([box for box in filled if box.piece.chunks is not None], checked_by_others)
            if self._identity() != self._opened_as:
                raise CorruptCheckpointError("was changed while it was read", where=str(self._path))

    @contextmanager
    def _mapped(self, is_needed: bool) -> Iterator[Pages]:
        """The file's pages, where rows are wanted. A file that another process cuts now would kill this one (SIGBUS)."""
        if not is_needed:
            yield b""
            return
        with mmap.mmap(self._descriptor, self._digests.size, prot=mmap.PROT_READ) as pages:
            yield pages

    def _read_blocks(
        self, wanted: Mapping[int, _WantedOfBlock], checked_by_others: Collection[int], pages: Pages = b""
    ) -> None:
        """Read what is wanted into place, and check each block once."""
        to_check = self._unchecked.intersection(wanted).difference(checked_by_others)

        def work(block: int) -> int:
            found = wanted[block]
            if block in to_check:
                return self._read_and_check(block, found, pages)
            _copy_rows(found.rows, _block(block, self._digests.size), pages)
            return sum(self._read_parts(begin, [part]) for begin, part in found.parts)

        self.bytes_read += sum(_in_threads(work, list(wanted), self._threads))
        self._unchecked -= to_check

    def _read_and_check(self, block: int, wanted: _WantedOfBlock, pages: Pages) -> int:
        """Read a whole block: what is wanted to its place, the rest to a scratch."""
        inside = _block(block, self._digests.size)
        scratch = self._scratch_block()[: len(inside)]
        parts = sorted(wanted.parts, key=lambda part: part[0])
        scattered = bool(wanted.rows) or len(parts) > _MOST_PARTS or _overlap(parts)
        digest = xxhash.xxh3_128()
        at = inside.start
        for stride in in_strides([scratch] if scattered else _with_gaps(parts, inside, scratch)):
            at += self._read_parts(at, stride)
            for view in stride:
                digest.update(view)
        if digest.hexdigest() != self._digests.blocks[block]:
            raise CorruptCheckpointError(
                f"block {block} (from byte {inside.start}) was changed after it was saved", where=str(self._path)
            )
        if scattered:
            for begin, part in parts:
                part[:] = scratch[begin - inside.start : begin - inside.start + len(part)]
        _copy_rows(wanted.rows, inside, pages, scratch)
        return at - inside.start

    def _read_parts(self, first_byte: int, parts: Sequence[memoryview]) -> int:
        """Fill the parts with the bytes that follow one another from `first_byte`."""
        rest = list(parts)
        position = first_byte
        while rest:
            count = os.preadv(self._descriptor, rest, position)
            if not count:
                raise CorruptCheckpointError(f"ends at byte {position}", where=str(self._path))
            position += count
            rest = behind(rest, count)
        return position - first_byte

    def _decompress(self, boxes: Sequence[WantedBox], checked_by_others: Collection[int]) -> None:
        """Read, check and decompress the chunks that hold something of compressed boxes, some at a time."""
        for batch in _batches(boxes):
            stored = {chunk: memoryview(bytearray(len(chunk))) for chunk in {wanted.stored for wanted in batch}}
            of_blocks = {block: _WantedOfBlock() for block in sorted({b for chunk in stored for b in blocks_of(chunk)})}
            for chunk, data in stored.items():
                _add_bytes(of_blocks, chunk.start, data)
            self._read_blocks(of_blocks, checked_by_others)

            def work(wanted: _WantedChunk, stored: dict[range, memoryview] = stored) -> int:
                self._copy_chunk(wanted, stored[wanted.stored])
                return 0

            _in_threads(work, batch, self._threads)

    def _copy_chunk(self, wanted: _WantedChunk, stored: memoryview) -> None:
        box = wanted.box
        assert box.piece.chunks is not None
        shape, size = box.piece.chunks.shape, box.out.itemsize
        try:
            plain = decompress(stored, prod(shape) * size, size, box.piece.chunks.filters)
        except DecompressionError as error:
            raise CorruptCheckpointError(
                f"the chunk at byte {wanted.stored.start} {error}", where=str(self._path)
            ) from None
        box.out[wanted.inside_box] = plain.view(box.out.dtype).reshape(shape)[wanted.inside_chunk]

    def _scratch_block(self) -> memoryview:
        if not hasattr(self._scratch, "block"):
            self._scratch.block = memoryview(bytearray(BLOCK_BYTES))
        block: memoryview = self._scratch.block
        return block

    def _identity(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns


def _digests_of(path: Path, expected: FileRecord) -> BlockDigests:
    digest_path = path.with_name(digest_name(path.name))
    found = size_of_file(path)
    size_of_file(digest_path)
    digests = read_digests(digest_path)
    if found != expected.size:
        raise CorruptCheckpointError(f"has {found} bytes instead of {expected.size}", where=str(path))
    if (digests.size, digests.whole) != (expected.size, expected.digest):
        raise CorruptCheckpointError("does not belong to its shard file", where=str(digest_path))
    return digests


def _add(wanted: Mapping[int, _WantedOfBlock], box: WantedBox) -> None:
    """Want a box of a piece that is not compressed."""
    if box.is_direct:
        _add_bytes(wanted, box.bytes_of_file.start, box.out.reshape(-1).view(np.uint8).data)
        return
    for rows in rows_of(box.piece.byte_offset, box.piece.shape, box.start, box.out):
        for block in blocks_of(range(rows.begins[0], rows.begins[-1] + 1)):
            wanted[block].rows.append(rows)


def _add_bytes(wanted: Mapping[int, _WantedOfBlock], first: int, data: memoryview) -> None:
    """Want the bytes of the file from `first` on in `data`."""
    for block in blocks_of(range(first, first + len(data))):
        begin, end = max(first, block * BLOCK_BYTES), min(first + len(data), (block + 1) * BLOCK_BYTES)
        wanted[block].parts.append((begin, data[begin - first : end - first]))


def _copy_rows(rows: Sequence[Rows], block: range, pages: Pages, held: memoryview | None = None) -> None:
    """Copy the rows that begin in a block: out of memory that holds the block, those that it holds, else out of the pages."""
    for one in rows:
        numbers = one.beginning_in(block)
        if held is not None:
            inside = one.beginning_in(range(block.start, max(block.start, block.stop - one.span + 1)))
            one.copy(inside, held, block.start)
            numbers = range(inside.stop, numbers.stop)
        one.copy(numbers, pages, 0)


def _block(number: int, size: int) -> range:
    """The bytes of a block of a file of `size` bytes."""
    return range(number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, size))


def blocks_of(inside: range) -> range:
    """The blocks that hold some bytes of a file."""
    return range(inside.start // BLOCK_BYTES, -(-inside.stop // BLOCK_BYTES))


def _batches(boxes: Iterable[WantedBox]) -> Iterator[list[_WantedChunk]]:
    """The chunks of boxes in the file's order, as many at a time as are held in memory."""
    wanted = []
    for box in boxes:
        chunks = box.piece.chunks
        assert chunks is not None
        for number, inside_chunk, inside_box in chunks_of_box(box.piece.shape, chunks.shape, box.start, box.out.shape):
            wanted.append(_WantedChunk(box, chunks.bytes_of_file(number), inside_chunk, inside_box))
    batch: list[_WantedChunk] = []
    held = 0
    for chunk in sorted(wanted, key=lambda chunk: chunk.stored.start):
        batch.append(chunk)
        held += len(chunk.stored)
        if held >= _BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _with_gaps(places: Sequence[tuple[int, memoryview]], block: range, scratch: memoryview) -> list[memoryview]:
    """The bytes of a block as parts that follow one another: the places, and what nobody wants."""
    parts = []
    position = block.start
    for begin, part in [*places, (block.stop, scratch[:0])]:
        if begin > position:
            parts.append(scratch[position - block.start : begin - block.start])
        if len(part):
            parts.append(part)
        position = begin + len(part)
    return parts


def _overlap(places: Sequence[tuple[int, memoryview]]) -> bool:
    """Whether some bytes are wanted at two places."""
    return any(begin + len(part) > following for (begin, part), (following, _) in pairwise(places))


def blocks_of_box(piece: Piece, start: Sequence[int], shape: Sequence[int], element_bytes: int) -> Collection[int]:
    """The blocks of a piece's file that hold a box of it, which is not empty."""
    if piece.chunks is None:
        return blocks_of(_bytes_of_box(piece, start, shape, element_bytes))
    within = chunks_of_box(piece.shape, piece.chunks.shape, start, shape)
    return {block for number, _, _ in within for block in blocks_of(piece.chunks.bytes_of_file(number))}


def _bytes_of_box(piece: Piece, start: Sequence[int], shape: Sequence[int], element_bytes: int) -> range:
    if tuple(shape) == piece.shape:  # mostly: and there may be thousands of them
        return range(piece.byte_offset, piece.byte_offset + piece.size * element_bytes)
    strides = [prod(piece.shape[axis + 1 :]) for axis in range(len(piece.shape))]
    first = sum(at * stride for at, stride in zip(start, strides, strict=True))
    last = first + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    return range(piece.byte_offset + first * element_bytes, piece.byte_offset + (last + 1) * element_bytes)


def _in_threads(work: Callable[[T], int], items: Sequence[T], threads: int) -> list[int]:
    """What `work` gives for each item, several at a time."""
    if threads == 1 or len(items) == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))

"""Reads boxes of tensors from one shard file directly into their targets, and checks the digest of each block it reads.

It does not use HDF5, so that links in a file cannot make it open another one. A box that is contiguous in the file and
in memory is read into its target and digested there. Other boxes are copied row by row, from a block that was just read
for its check, or from the memory-mapped file. For a compressed piece, the chunks that overlap the box are read, checked
and decompressed.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import xxhash

from toolkit.checkpoint.errors import CorruptCheckpointError, reading
from toolkit.checkpoint.format.byte_views import in_cached_parts, without_first
from toolkit.checkpoint.format.chunks import chunks_of_box
from toolkit.checkpoint.format.digests import BLOCK_BYTES, BlockDigests, read_digests, size_of_file
from toolkit.checkpoint.format.filters import DecompressionError, decompress
from toolkit.checkpoint.format.layout import digest_name
from toolkit.checkpoint.format.manifest import FileRecord
from toolkit.checkpoint.loading.wanted import FileReads, Rows, WantedBox, WantedOfBlock, add_bytes, in_file_order

T = TypeVar("T")
Pages = mmap.mmap | bytes

_BATCH_BYTES = 64 * 1024 * 1024  # the total size of compressed chunks in memory at a time


@dataclass(frozen=True, eq=False)
class _WantedChunk:
    """A chunk that overlaps a box: its bytes in the file, and the overlap."""

    box: WantedBox
    stored: range
    inside_chunk: tuple[slice, ...]
    inside_box: tuple[slice, ...]


class ShardReader:
    """A context manager that reads one shard file; `bytes_read` includes bytes that are only checked."""

    def __init__(self, path: Path, expected: FileRecord, *, threads: int = 1) -> None:
        """Open the file, which must have the size and digests that the manifest states.

        Raises CorruptCheckpointError if they differ, and OwnFailureError if this host cannot read the file.
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

    def read(self, reads: FileReads, *, checked_by_others: Collection[int] = ()) -> None:
        """Fill the targets of `reads`, without checking the blocks that other ranks of this node check.

        After an error the targets are undefined. Raises CorruptCheckpointError for a damaged block or a file that
        changed in the meantime, and OwnFailureError if this host cannot read it.
        """
        has_rows = any(of_block.rows for of_block in reads.blocks.values())
        with reading(self._path), self._mapped(has_rows) as pages:
            self._read_blocks(reads.blocks, checked_by_others, pages)
            self._decompress(reads.compressed, checked_by_others)
            if self._identity() != self._opened_as:
                raise CorruptCheckpointError("was changed while it was read", where=str(self._path))

    @contextmanager
    def _mapped(self, is_needed: bool) -> Iterator[Pages]:
        """Map the file into memory, if needed. If another process then truncates it, SIGBUS kills this process."""
        if not is_needed:
            yield b""
            return
        with mmap.mmap(self._descriptor, self._digests.size, prot=mmap.PROT_READ) as pages:
            yield pages

    def _read_blocks(
        self, wanted: Mapping[int, WantedOfBlock], checked_by_others: Collection[int], pages: Pages = b""
    ) -> None:
        """Read the wanted bytes into their targets, and check each block that was not checked before."""
        to_check = self._unchecked.intersection(wanted).difference(checked_by_others)

        def work(block: int) -> int:
            of_block = wanted[block]
            if block in to_check:
                return self._read_and_check(block, of_block, pages)
            _copy_rows(of_block.rows, _block(block, self._digests.size), pages)
            return sum(self._read_parts(begin, [part]) for begin, part in of_block.parts)

        self.bytes_read += sum(_in_threads(work, list(wanted), self._threads))
        self._unchecked -= to_check

    def _read_and_check(self, block: int, wanted: WantedOfBlock, pages: Pages) -> int:
        """Read and check a whole block: the wanted bytes go into their targets, the rest into a scratch buffer."""
        inside = _block(block, self._digests.size)
        scratch = self._scratch_block()[: len(inside)]
        parts = wanted.in_order
        digest = xxhash.xxh3_128()
        at = inside.start
        for cached in in_cached_parts([scratch] if wanted.is_scattered else _with_gaps(parts, inside, scratch)):
            at += self._read_parts(at, cached)
            for view in cached:
                digest.update(view)
        if digest.hexdigest() != self._digests.blocks[block]:
            raise CorruptCheckpointError(
                f"block {block} (from byte {inside.start}) was changed after it was saved", where=str(self._path)
            )
        if wanted.is_scattered:
            for begin, part in parts:
                part[:] = scratch[begin - inside.start : begin - inside.start + len(part)]
        _copy_rows(wanted.rows, inside, pages, scratch)
        return at - inside.start

    def _read_parts(self, first_byte: int, parts: Sequence[memoryview]) -> int:
        """Fill `parts`, in order, with the bytes of the file from `first_byte` on."""
        rest = list(parts)
        position = first_byte
        while rest:
            count = os.preadv(self._descriptor, rest, position)
            if not count:
                raise CorruptCheckpointError(f"ends too early, at byte {position}", where=str(self._path))
            position += count
            rest = without_first(rest, count)
        return position - first_byte

    def _decompress(self, boxes: Sequence[WantedBox], checked_by_others: Collection[int]) -> None:
        """Read, check and decompress the chunks that overlap compressed boxes, in batches."""
        for batch in _batches(boxes):
            stored = {chunk: memoryview(bytearray(len(chunk))) for chunk in {wanted.stored for wanted in batch}}
            of_blocks: defaultdict[int, WantedOfBlock] = defaultdict(WantedOfBlock)
            for chunk, data in stored.items():
                add_bytes(of_blocks, chunk.start, data)
            self._read_blocks(in_file_order(of_blocks), checked_by_others)

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
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


def _digests_of(path: Path, expected: FileRecord) -> BlockDigests:
    digest_path = path.with_name(digest_name(path.name))
    size = size_of_file(path)
    size_of_file(digest_path)
    digests = read_digests(digest_path)
    if size != expected.size:
        raise CorruptCheckpointError(f"has {size} bytes instead of {expected.size}", where=str(path))
    if (digests.size, digests.whole) != (expected.size, expected.digest):
        raise CorruptCheckpointError("does not match the manifest's digest of its shard file", where=str(digest_path))
    return digests


def _copy_rows(rows: Sequence[Rows], block: range, pages: Pages, content: memoryview | None = None) -> None:
    """Copy the rows that start in a block: from its `content` if they also end in it, else from the mapped file."""
    for part in rows:
        numbers = part.starting_in(block)
        if content is not None:
            inside = part.starting_in(range(block.start, max(block.start, block.stop - part.span + 1)))
            part.copy(inside, content, block.start)
            numbers = range(inside.stop, numbers.stop)
        part.copy(numbers, pages, 0)


def _block(number: int, size: int) -> range:
    """Return the byte range of a block in a file of `size` bytes."""
    return range(number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, size))


def _batches(boxes: Iterable[WantedBox]) -> Iterator[list[_WantedChunk]]:
    """Return the chunks that overlap the boxes, in file order, in batches that fit into memory."""
    wanted = []
    for box in boxes:
        chunks = box.piece.chunks
        assert chunks is not None
        for number, inside_chunk, inside_box in chunks_of_box(box.piece.shape, chunks.shape, box.start, box.out.shape):
            wanted.append(_WantedChunk(box, chunks.bytes_of_file(number), inside_chunk, inside_box))
    batch: list[_WantedChunk] = []
    batch_bytes = 0
    for chunk in sorted(wanted, key=lambda chunk: chunk.stored.start):
        batch.append(chunk)
        batch_bytes += len(chunk.stored)
        if batch_bytes >= _BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def _with_gaps(places: Sequence[tuple[int, memoryview]], block: range, scratch: memoryview) -> list[memoryview]:
    """Return the buffers for all bytes of a block in order: the targets, and scratch memory for the gaps."""
    parts = []
    position = block.start
    for begin, part in [*places, (block.stop, scratch[:0])]:
        if begin > position:
            parts.append(scratch[position - block.start : begin - block.start])
        if len(part):
            parts.append(part)
        position = begin + len(part)
    return parts


def _in_threads(work: Callable[[T], int], items: Sequence[T], threads: int) -> list[int]:
    """Call `work` for all items in several threads and return the results in order."""
    if threads == 1 or len(items) == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))

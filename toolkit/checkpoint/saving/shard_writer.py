"""Writes a shard file in blocks from several threads, and digests each block while it is in the CPU cache."""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import cast

import xxhash

from toolkit.checkpoint.format.byte_views import in_cached_parts, in_lengths, without_first
from toolkit.checkpoint.format.digests import BLOCK_BYTES, BlockDigests
from toolkit.checkpoint.format.shard_layout import ShardLayout
from toolkit.rundir.files import mode_of_files_in

_WRITEBACK_BYTES = 4 * BLOCK_BYTES
_ZEROS = memoryview(bytes(BLOCK_BYTES))


def write_shard(path: Path, layout: ShardLayout, data: Sequence[memoryview], *, threads: int = 1) -> BlockDigests:
    """Write a shard file from the bytes of its pieces, sync it to disk, and return its digests.

    Overwrites an existing file, because reusing its disk blocks is faster than allocating new ones.
    """
    blocks = range(0, layout.size, BLOCK_BYTES)
    parts = in_lengths(_in_file_order(layout, data), BLOCK_BYTES)
    with open_for_writing(path) as descriptor:
        os.ftruncate(descriptor, layout.size)
        if threads > 1 and len(blocks) > 1:
            with ThreadPoolExecutor(threads) as pool:
                digests = list(
                    pool.map(lambda block: _write_block(descriptor, *block), zip(blocks, parts, strict=True))
                )
        else:
            digests = [_write_block(descriptor, *block) for block in zip(blocks, parts, strict=True)]
        os.fsync(descriptor)
    return BlockDigests(layout.size, tuple(digests))


def _write_block(descriptor: int, first_byte: int, parts: list[memoryview]) -> str:
    """Write a block and return its digest. Starts the writeback of the page cache every few blocks."""
    digest = xxhash.xxh3_128()
    end = first_byte
    for cached in in_cached_parts(parts):
        end += write_whole(descriptor, cached, end)
        for part in cached:
            digest.update(part)
    if end % _WRITEBACK_BYTES == 0:
        begin_writeback(descriptor, end - _WRITEBACK_BYTES, _WRITEBACK_BYTES)
    return digest.hexdigest()


def write_whole(descriptor: int, parts: Sequence[memoryview], first_byte: int) -> int:
    """Write contiguous parts completely and return the number of bytes; one system call may write fewer."""
    rest = list(parts)
    position = first_byte
    while rest:
        written = os.pwritev(descriptor, rest, position)
        position += written
        rest = without_first(rest, written)
    return position - first_byte


def _in_file_order(layout: ShardLayout, data: Sequence[memoryview]) -> Iterator[memoryview]:
    """Return the content of the whole file in order, with zeros in the gaps."""
    known = [(first, memoryview(content)) for first, content in layout.structure]
    known += [(start, view) for start, view in zip(layout.starts, data, strict=True) if start]
    position = 0
    for first, view in [*sorted(known, key=lambda part: part[0]), (layout.size, memoryview(b""))]:
        while position < first:
            zeros = _ZEROS[: first - position]
            position += len(zeros)
            yield zeros
        position += len(view)
        yield view


@contextmanager
def open_for_writing(path: Path, *, create: bool = True) -> Iterator[int]:
    """Open a file with the mode of its folder; `create` makes a new one if there is none, or if it has hard links."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        if create and os.fstat(descriptor).st_nlink > 1:  # a user has linked the old file and expects it to stay
            path.unlink()
            linked, descriptor = descriptor, os.open(path, flags | os.O_EXCL, 0o600)
            os.close(linked)
        os.fchmod(descriptor, mode_of_files_in(path.parent))  # the umask must not decide who can read
        yield descriptor
    except OSError as error:
        error.filename = str(path)  # errors of descriptors name no file
        raise
    finally:
        os.close(descriptor)


_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start, without waiting (sync_file_range(2))


@cache
def _sync_file_range() -> Callable[..., int]:
    function = ctypes.CDLL(None).sync_file_range
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast(Callable[..., int], function)


def begin_writeback(descriptor: int, first_byte: int, size_bytes: int) -> None:
    """Start the writeback of a range to disk. Ignores errors, because the later fsync reports them."""
    _sync_file_range()(descriptor, first_byte, size_bytes, _WRITE)

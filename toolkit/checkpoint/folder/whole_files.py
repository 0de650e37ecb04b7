"""Reads and digests whole files at disk speed, with several threads that each use one small buffer.

A part of 512 KiB stays in the CPU cache between reading and digesting it. Both operations release the GIL.
"""

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from toolkit.checkpoint.errors import host_cannot_read
from toolkit.checkpoint.format.digests import BLOCK_BYTES

PART_BYTES = 512 * 1024
BLOCKS_AT_ONCE = 16  # 64 MiB per task: small enough for several threads per file, large enough for sequential reads
MOST_THREADS = 16


@dataclass(frozen=True)
class Unreadable:
    """A block that could not be read: the first unreadable byte of the file, and the reason."""

    byte: int
    why: str


Block = str | Unreadable  # the digest of a block, or why the block could not be read


def read_whole(files: Sequence[tuple[Path, int]], read: Callable[[int], None]) -> Iterator[tuple[Path, list[Block]]]:
    """Yield each path with its block digests, in order. Raises OwnFailureError if this host cannot read a file.

    `files` contains (path, size in bytes). Threads call `read` with the number of bytes read since their last call.
    """
    spans = [
        (path, range(first, min(first + BLOCKS_AT_ONCE * BLOCK_BYTES, size)))
        for path, size in files
        for first in range(0, size, BLOCKS_AT_ONCE * BLOCK_BYTES)
    ]
    pool = ThreadPoolExecutor(_threads(), "checkpoint reading")
    try:
        parts: deque[tuple[Path, Future[list[Block]]]] = deque(
            (path, pool.submit(blocks_of_span, path, span, read)) for path, span in spans
        )
        for path, _ in files:
            blocks: list[Block] = []
            while parts and parts[0][0] == path:
                blocks += parts.popleft()[1].result()
            yield path, blocks
    finally:  # this also runs if the caller stops early
        pool.shutdown(cancel_futures=True)


def _threads() -> int:
    """Return twice the number of CPUs, because about half of the threads wait for the disk."""
    return min(MOST_THREADS, 2 * len(os.sched_getaffinity(0)))


def blocks_of_span(path: Path, span: range, read: Callable[[int], None]) -> list[Block]:
    """Digest the blocks of a span that starts at a block boundary. Raises OwnFailureError if it is unreadable."""
    buffer = memoryview(bytearray(PART_BYTES))
    try:
        # Each span has its own descriptor, because the kernel reads ahead per descriptor.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return [Unreadable(byte, "is missing") for byte in span[::BLOCK_BYTES]]
    except OSError as error:
        raise host_cannot_read(error, path) from None
    try:
        os.posix_fadvise(descriptor, span.start, len(span), os.POSIX_FADV_SEQUENTIAL)
        return [
            _block(path, descriptor, range(first, min(first + BLOCK_BYTES, span.stop)), buffer, read)
            for first in span[::BLOCK_BYTES]
        ]
    finally:
        os.close(descriptor)


def _block(path: Path, descriptor: int, span: range, buffer: memoryview, read: Callable[[int], None]) -> Block:
    digest = xxhash.xxh3_128()
    at = span.start
    while at < span.stop:
        try:
            count = os.preadv(descriptor, [buffer[: span.stop - at]], at)
        except OSError as error:
            if error.errno != errno.EIO:
                raise host_cannot_read(error, path) from None
            return Unreadable(at, f"cannot be read from byte {at} on: {os.strerror(errno.EIO)}")
        if not count:
            return Unreadable(at, f"ends too early, at byte {at}")
        digest.update(buffer[:count])
        read(count)
        at += count
    return digest.hexdigest()

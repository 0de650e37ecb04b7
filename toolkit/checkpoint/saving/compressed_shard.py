"""Writes a shard file with compressed pieces: threads compress chunks in parallel, and HDF5 writes them in order."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path

import numpy as np

from toolkit.checkpoint.folder.commit import sync
from toolkit.checkpoint.format.chunks import Chunks, chunk_ranges, chunk_shape, grid
from toolkit.checkpoint.format.digests import BlockDigests, digests_of_file
from toolkit.checkpoint.format.elements import element
from toolkit.checkpoint.format.filters import Compression, compress
from toolkit.checkpoint.format.shard_layout import StoredPiece
from toolkit.checkpoint.saving.streamed_shard import StreamedShard, stream_shard

_LEAST_BYTES = 4096  # compressing a smaller piece would not save a disk page
_LARGEST_PART = 31 / 32  # a piece whose first chunk remains larger is stored uncompressed, to be read faster
_CHUNKS_AHEAD = 4  # the number of chunks that each thread may compress in advance

Place = int | Chunks  # where a piece is in the file: its first byte, or its compressed chunks


@dataclass(frozen=True)
class _Chunk:
    """One chunk to compress: the index of its piece, its start in the piece, its bytes, and its padded size."""

    piece: int
    start: tuple[int, ...]
    plain: memoryview
    chunk_bytes: int
    element_bytes: int


def write_compressed(
    path: Path, pieces: Sequence[StoredPiece], data: Sequence[memoryview], kind: Compression, *, threads: int = 1
) -> tuple[BlockDigests, list[Place]]:
    """Write a shard file, replacing an older one, and sync it to disk. Returns its digests and the place of each piece.

    `data` contains the bytes of each piece; `threads` threads compress them. Raises OSError if a write failed.
    """
    path.unlink(missing_ok=True)
    with ThreadPoolExecutor(threads) as pool, stream_shard(path) as shard:
        places = list(_write_pieces(shard, pool, pieces, data, kind, ahead=threads * _CHUNKS_AHEAD))
    sync(path)
    return digests_of_file(path), places


def _write_pieces(
    shard: StreamedShard,
    pool: ThreadPoolExecutor,
    pieces: Sequence[StoredPiece],
    data: Sequence[memoryview],
    kind: Compression,
    *,
    ahead: int,
) -> Iterator[Place]:
    incompressible: set[int] = set()

    def work(chunk: _Chunk) -> bytes:
        if chunk.piece in incompressible:
            return b""
        return compress(chunk.plain, chunk.chunk_bytes, chunk.element_bytes, kind)

    compressed = _ahead(pool, work, _chunks(pieces, data), ahead)
    for number, (piece, plain) in enumerate(zip(pieces, data, strict=True)):
        if len(plain) >= _LEAST_BYTES:
            shape = chunk_shape(piece.extent, element(piece.dtype).size_bytes)
            stored = islice(compressed, prod(grid(piece.extent, shape)))
            first, first_bytes = next(stored)
            if len(first_bytes) <= _LARGEST_PART * len(first.plain):
                chunked = shard.chunked(piece, shape, kind)
                chunked.write(first.start, first_bytes)
                for chunk, chunk_bytes in stored:
                    chunked.write(chunk.start, chunk_bytes)
                yield chunked.chunks()
                continue
            incompressible.add(number)
            deque(stored, maxlen=0)
        yield shard.write_piece(piece, np.frombuffer(plain, element(piece.dtype).memory).reshape(piece.extent))


def _chunks(pieces: Sequence[StoredPiece], data: Sequence[memoryview]) -> Iterator[_Chunk]:
    """Return the chunks of all pieces that are large enough to compress, in order."""
    for number, (piece, plain) in enumerate(zip(pieces, data, strict=True)):
        if len(plain) < _LEAST_BYTES:
            continue
        size = element(piece.dtype).size_bytes
        shape = chunk_shape(piece.extent, size)
        for start, elements in chunk_ranges(piece.extent, shape):
            yield _Chunk(number, start, plain[elements.start * size : elements.stop * size], prod(shape) * size, size)


def _ahead(
    pool: ThreadPoolExecutor, work: Callable[[_Chunk], bytes], chunks: Iterator[_Chunk], ahead: int
) -> Iterator[tuple[_Chunk, bytes]]:
    """Yield each chunk with the result of `work`, while the pool processes at most `ahead` chunks after it."""
    waiting: deque[tuple[_Chunk, Future[bytes]]] = deque()
    for chunk in chunks:
        waiting.append((chunk, pool.submit(work, chunk)))
        if len(waiting) > ahead:
            first, future = waiting.popleft()
            yield first, future.result()
    for chunk, future in waiting:
        yield chunk, future.result()

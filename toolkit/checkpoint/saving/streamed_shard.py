"""A shard file whose pieces come one after the other, of numbers and sizes that nobody knows before: HDF5 writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5s

from toolkit.checkpoint.format.chunks import Chunks
from toolkit.checkpoint.format.filters import FILTERS, Compression
from toolkit.checkpoint.format.output import new_hdf5_file
from toolkit.checkpoint.format.shard_layout import ALIGNMENT, StoredPiece, describe


class ChunkedPiece:
    """A compressed piece that is being written; each of its chunks must be."""

    def __init__(self, dataset: h5d.DatasetID, chunk: tuple[int, ...], filters: tuple[str, ...]) -> None:
        self._dataset = dataset
        self._chunk = chunk
        self._filters = filters

    def write(self, start: tuple[int, ...], stored: bytes) -> None:
        """Write the chunk that begins at an element of the piece, as its filters made it."""
        self._dataset.write_direct_chunk(start, stored)

    def chunks(self) -> Chunks:
        """Where all chunks are."""
        found: list[h5d.StoreInfo] = []
        self._dataset.chunk_iter(found.append)
        ordered = sorted(found, key=lambda chunk: chunk.chunk_offset)
        return Chunks(self._chunk, tuple((chunk.byte_offset, chunk.size) for chunk in ordered), self._filters)


class StreamedShard:
    """One shard file that is being written: `stream_shard`."""

    def __init__(self, file: h5py.File) -> None:
        self._file = file

    def write(self, name: str, dtype: str, shape: Sequence[int], offset: Sequence[int], data: np.ndarray) -> int:
        """Write one piece and return where its bytes begin in the file (0 for a piece without elements).

        Args:
            name: the tensor's name.
            dtype: a name of `elements.ELEMENTS`.
            shape: the global shape.
            offset: where the piece begins in the global tensor.
            data: the piece, C-contiguous, of the element's `memory` type.
        """
        return self.write_piece(StoredPiece(name, dtype, tuple(shape), tuple(offset), data.shape), data)

    def write_piece(self, piece: StoredPiece, data: np.ndarray) -> int:
        """As `write`."""
        dataset = describe(self._file, piece)
        if not data.size:
            return 0
        dataset.write(h5s.ALL, h5s.ALL, data, mtype=dataset.get_type())
        return int(dataset.get_offset())

    def chunked(self, piece: StoredPiece, chunk: tuple[int, ...], compression: Compression) -> ChunkedPiece:
        """Begin a compressed piece, with chunks of the shape `chunk`."""
        return ChunkedPiece(
            describe(self._file, piece, chunk=chunk, compression=compression), chunk, FILTERS[compression]
        )


@contextmanager
def stream_shard(path: Path) -> Iterator[StreamedShard]:
    """A new shard file, which is complete when the context ends.

    Raises:
        OSError: not all of it could be written.
    """
    with new_hdf5_file(path, **ALIGNMENT) as file:
        file.attrs["format"] = "toolkit-shard 1"
        yield StreamedShard(file)

"""Writes a shard file piece by piece through HDF5, for pieces whose number and sizes are not known in advance."""

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
    """A compressed piece that is being written; the caller must write each of its chunks."""

    def __init__(self, dataset: h5d.DatasetID, chunk: tuple[int, ...], filters: tuple[str, ...]) -> None:
        self._dataset = dataset
        self._chunk = chunk
        self._filters = filters

    def write(self, start: tuple[int, ...], stored: bytes) -> None:
        """Write a compressed chunk; `start` is the index of its first element in the piece."""
        self._dataset.write_direct_chunk(start, stored)

    def chunks(self) -> Chunks:
        """Return the positions and sizes of all written chunks in the file."""
        stored: list[h5d.StoreInfo] = []
        self._dataset.chunk_iter(stored.append)
        ordered = sorted(stored, key=lambda chunk: chunk.chunk_offset)
        return Chunks(self._chunk, tuple((chunk.byte_offset, chunk.size) for chunk in ordered), self._filters)


class StreamedShard:
    """A shard file that is being written; `stream_shard` creates it."""

    def __init__(self, file: h5py.File) -> None:
        self._file = file

    def write(self, name: str, dtype: str, shape: Sequence[int], offset: Sequence[int], data: np.ndarray) -> int:
        """Write the C-contiguous piece at `offset` and return its first byte in the file (0 if it has no elements)."""
        return self.write_piece(StoredPiece(name, dtype, tuple(shape), tuple(offset), data.shape), data)

    def write_piece(self, piece: StoredPiece, data: np.ndarray) -> int:
        """Write a piece as `write` does."""
        dataset = describe(self._file, piece)
        if not data.size:
            return 0
        dataset.write(h5s.ALL, h5s.ALL, data, mtype=dataset.get_type())
        return int(dataset.get_offset())

    def chunked(self, piece: StoredPiece, chunk: tuple[int, ...], compression: Compression) -> ChunkedPiece:
        """Start a compressed piece with chunks of the shape `chunk`."""
        return ChunkedPiece(
            describe(self._file, piece, chunk=chunk, compression=compression), chunk, FILTERS[compression]
        )


@contextmanager
def stream_shard(path: Path) -> Iterator[StreamedShard]:
    """Create a shard file, which is complete when the context ends. Raises OSError if a write failed."""
    with new_hdf5_file(path, **ALIGNMENT) as file:
        file.attrs["format"] = "toolkit-shard 1"
        yield StreamedShard(file)

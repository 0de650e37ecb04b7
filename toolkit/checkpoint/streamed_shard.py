"""A shard file whose pieces come one after the other, of numbers and sizes that nobody knows before: HDF5 writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
from h5py import h5s

from toolkit.checkpoint.output import new_hdf5_file
from toolkit.checkpoint.shard_layout import ALIGNMENT, StoredPiece, describe


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
        dataset = describe(self._file, StoredPiece(name, dtype, tuple(shape), tuple(offset), data.shape))
        if not data.size:
            return 0
        dataset.write(h5s.ALL, h5s.ALL, data, mtype=dataset.get_type())
        return int(dataset.get_offset())


@contextmanager
def stream_shard(path: Path) -> Iterator[StreamedShard]:
    """A new shard file, which is complete when the context ends.

    Raises:
        OSError: not all of it could be written.
    """
    with new_hdf5_file(path, **ALIGNMENT) as file:
        file.attrs["format"] = "toolkit-shard 1"
        yield StreamedShard(file)

"""Shard files: the HDF5 file that one rank writes, and reading boxes of its pieces.

`/tensors/<escaped name>` is a group with the tensor's `dtype` and global `shape`; each of its datasets is
one piece, named by its offset and contiguous in the file.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p, h5s

from toolkit.checkpoint.digests import BlockChecker, read_digests, size_of_file
from toolkit.checkpoint.elements import element
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.layout import digest_name
from toolkit.checkpoint.manifest import FileRecord, Piece, TensorRecord
from toolkit.checkpoint.names import escape
from toolkit.checkpoint.output import new_hdf5_file
from toolkit.errors import OwnFailureError

# Tensors of a page and more start on a page; small ones are packed.
ALIGNMENT_BYTES = 4096


def group_path(name: str) -> str:
    """The group of a tensor inside a shard file."""
    return f"/tensors/{escape(name)}"


def dataset_name(offset: Sequence[int]) -> str:
    """The dataset of a piece inside its tensor's group: "0,128"; "scalar" without dimensions."""
    return ",".join(map(str, offset)) or "scalar"


class ShardWriter:
    """Writes one shard file: `open_shard`."""

    def __init__(self, file: h5py.File) -> None:
        self._file = file
        self._file.attrs["format"] = "toolkit-shard 1"
        # The data are written once and whole: no fill first, and space is taken in the order of writing.
        self._properties = h5p.create(h5p.DATASET_CREATE)
        self._properties.set_layout(h5d.CONTIGUOUS)
        self._properties.set_fill_time(h5d.FILL_TIME_NEVER)

    def write(self, name: str, dtype: str, shape: Sequence[int], offset: Sequence[int], data: np.ndarray) -> int:
        """Write one piece and return where its bytes begin in the file (0 for a piece without elements).

        Args:
            name: the tensor's name.
            dtype: a name of `elements.ELEMENTS`.
            shape: the global shape.
            offset: where the piece begins in the global tensor.
            data: the piece, C-contiguous, of the element's `memory` type.
        """
        kind = element(dtype, where=name).file_type()
        group = self._file.require_group(group_path(name))
        group.attrs["dtype"] = dtype
        group.attrs["shape"] = np.array(shape, "<i8")
        space = h5s.create_simple(data.shape) if data.shape else h5s.create(h5s.SCALAR)
        dataset = h5d.create(group.id, dataset_name(offset).encode(), kind, space, self._properties)
        h5py.Dataset(dataset).attrs["offset"] = np.array(offset, "<i8")
        if not data.size:
            return 0
        dataset.write(h5s.ALL, h5s.ALL, data, mtype=kind)
        return int(dataset.get_offset())


@contextmanager
def open_shard(path: Path) -> Iterator[ShardWriter]:
    """A new shard file, which is complete when the context ends.

    Raises:
        OSError: not all of it could be written.
    """
    with new_hdf5_file(path, alignment_threshold=ALIGNMENT_BYTES, alignment_interval=ALIGNMENT_BYTES) as file:
        yield ShardWriter(file)


class ShardReader:
    """Reads boxes from one shard file, after the blocks that hold them passed their digests.

    A context manager: the file is open inside it. It may be entered again; what was checked stays checked.
    """

    def __init__(self, path: Path, expected: FileRecord) -> None:
        """Look at the file, which must have the size and digests that the manifest states.

        Raises:
            CorruptCheckpointError: when the file or its digests are missing or cut, or its first block is damaged.
        """
        self._path = path
        digest_path = path.with_name(digest_name(path.name))
        found = size_of_file(path)
        size_of_file(digest_path)
        digests = read_digests(digest_path)
        if found != expected.size:
            raise CorruptCheckpointError(f"has {found} bytes instead of {expected.size}", where=str(path))
        if (digests.size, digests.whole) != (expected.size, expected.digest):
            raise CorruptCheckpointError("does not belong to its shard file", where=str(digest_path))
        self._checker = BlockChecker(path, digests)
        # The first block holds the root of the file's structure.
        self._checker.check(0, 1)

    def __enter__(self) -> ShardReader:
        """Open the file.

        Raises:
            CorruptCheckpointError: it is missing, or HDF5 cannot make sense of it.
            OwnFailureError: the system did not let this host open it, which says nothing about the checkpoint.
        """
        try:
            self._file = h5py.File(self._path, "r", locking=False)
        except OSError as error:
            _raise_if_of_the_system(error, self._path)
            raise CorruptCheckpointError(f"cannot be opened: {error}", where=str(self._path)) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def check(self, name: str, record: TensorRecord, piece: Piece, start: Sequence[int], shape: Sequence[int]) -> None:
        """Check the box of `shape` that begins at `start` inside the piece; no element of it is handed out.

        Raises:
            CorruptCheckpointError: when a block that holds the box is damaged, or HDF5 finds it elsewhere.
        """
        if not prod(shape):
            return
        kind = element(record.dtype, where=name)
        first, end = touched_bytes(piece.shape, start, shape, kind.size_bytes)
        self._checker.check(piece.byte_offset + first, piece.byte_offset + end)
        dataset = self._dataset(name, piece)
        if dataset.id.get_offset() != piece.byte_offset or dataset.shape != piece.shape:
            raise CorruptCheckpointError(f"holds {name} elsewhere than its manifest says", where=str(self._path))
        if not dataset.id.get_type().equal(kind.file_type()):
            raise CorruptCheckpointError(f"holds {name} as another type than its manifest says", where=str(self._path))

    def read(self, name: str, record: TensorRecord, piece: Piece, start: Sequence[int], out: np.ndarray) -> None:
        """Read the box of `out`'s shape that begins at `start` inside the piece, checked before.

        Args:
            out: C-contiguous, of the element's `memory` type; it is overwritten.

        Raises:
            CorruptCheckpointError: as `check`.
        """
        if not out.size:
            return
        self.check(name, record, piece, start, out.shape)
        kind = element(record.dtype, where=name)
        dataset = self._dataset(name, piece)
        if not piece.shape:
            dataset.id.read(h5s.ALL, h5s.ALL, out, mtype=kind.file_type())
            return
        space = dataset.id.get_space()
        space.select_hyperslab(tuple(start), out.shape)
        dataset.id.read(h5s.create_simple(out.shape), space, out, mtype=kind.file_type())

    def _dataset(self, name: str, piece: Piece) -> h5py.Dataset:
        """A piece's dataset, reached without links: HDF5 would follow one into another file, wherever that lies."""
        place: Any = self._file
        try:
            for link in ("tensors", escape(name), dataset_name(piece.offset)):
                if not isinstance(place, h5py.Group) or not isinstance(place.get(link, getlink=True), h5py.HardLink):
                    raise KeyError(f"{link} is not there")
                place = place[link]
        except (KeyError, OSError, RuntimeError) as error:
            _raise_if_of_the_system(error, self._path)
            raise CorruptCheckpointError(
                f"does not give {name} at {list(piece.offset)}: {error.args[0]}", where=str(self._path)
            ) from None
        if not isinstance(place, h5py.Dataset):
            raise CorruptCheckpointError(f"holds no dataset for {name} at {list(piece.offset)}", where=str(self._path))
        return place


def _raise_if_of_the_system(error: Exception, path: Path) -> None:
    """Tell a host that cannot read from a file that is damaged: HDF5's own complaints have no errno."""
    number = error.errno if isinstance(error, OSError) else None
    if number and number != errno.ENOENT:
        raise OwnFailureError(
            f"cannot be read on {socket.gethostname()}: {errno.errorcode.get(number, number)}: {os.strerror(number)}",
            where=str(path),
            fix="mend or exclude that host; the checkpoint was left as it is",
        ) from error


def touched_bytes(
    piece_shape: Sequence[int], start: Sequence[int], shape: Sequence[int], element_bytes: int
) -> tuple[int, int]:
    """The range of a contiguous piece's bytes, [first, end), that holds a box of it."""
    strides = [prod(piece_shape[axis + 1 :]) for axis in range(len(piece_shape))]
    first = sum(at * stride for at, stride in zip(start, strides, strict=True))
    last = first + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    return first * element_bytes, (last + 1) * element_bytes

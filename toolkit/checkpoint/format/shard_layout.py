"""Computes the layout of a shard file: the offsets of the tensor data, and all other bytes (the HDF5 structure).

HDF5 creates the file once, in memory and without the data. While the shape of the state stays the same, a save only
writes bytes at known offsets. Threads can do this in parallel, and a full disk cannot crash HDF5.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5p, h5s, h5t

from toolkit.checkpoint.format.elements import element
from toolkit.checkpoint.format.filters import Compression, set_filters
from toolkit.checkpoint.format.manifest import check_dimensions
from toolkit.checkpoint.format.output import hdf5_in_memory

_EMPTY = "%"
_ESCAPED_CHARACTER = re.compile("[/%\x00-\x1f\x7f\ud800-\udfff]")
_ESCAPED_BYTES = re.compile("(?:%[0-9A-F]{2})+")


def escape(name: str) -> str:
    """Convert a tensor name to an HDF5 link name: "a/b" becomes "a%2Fb". `unescape` is the exact inverse."""
    if not name:
        return _EMPTY
    if set(name) == {"."}:
        return name.replace(".", "%2E")
    return _ESCAPED_CHARACTER.sub(lambda match: _percent(match.group()), name)


def unescape(link: str) -> str:
    """Convert an HDF5 link name that `escape` made back to the tensor name."""
    if link == _EMPTY:
        return ""
    return _ESCAPED_BYTES.sub(lambda match: _plain(match.group()), link)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def _plain(escaped: str) -> str:
    return bytes.fromhex(escaped.replace("%", "")).decode("utf-8", "surrogatepass")


# Tensors of at least one page (4 KiB) start at a page boundary; smaller ones are packed.
ALIGNMENT = {"alignment_threshold": 4096, "alignment_interval": 4096}


def group_path(name: str) -> str:
    """Return the HDF5 path of the group of a tensor in a shard file."""
    return f"/tensors/{escape(name)}"


def dataset_name(offset: Sequence[int]) -> str:
    """Return the name of the dataset of a piece in the group of its tensor: "0,128", or "scalar" without dimensions."""
    return ",".join(map(str, offset)) or "scalar"


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor that one rank stores: `shape` is the global shape, `offset` and `extent` define the box."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the box in bytes."""
        return prod(self.extent) * element(self.dtype, where=self.name).size_bytes


@dataclass(frozen=True)
class ShardLayout:
    """A shard file without its data.

    `starts` are the first bytes of the pieces (0 for a piece without elements). `structure` contains the HDF5 structure
    as (first byte, bytes) in ascending order. All other bytes outside the data are zero.
    """

    pieces: tuple[StoredPiece, ...]
    starts: tuple[int, ...]
    structure: tuple[tuple[int, bytes], ...]
    size: int

    @property
    def data_bytes(self) -> int:
        """The total size of all pieces in bytes."""
        return sum(piece.size_bytes for piece in self.pieces)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges [first, end) of the file that contain no tensor data."""
        data = sorted(
            (start, start + piece.size_bytes) for piece, start in zip(self.pieces, self.starts, strict=True) if start
        )
        for (_, first), (end, _) in pairwise([(0, 0), *data, (self.size, self.size)]):
            if end > first:
                yield first, end


@lru_cache(maxsize=4)  # a run has one layout, or a few if it saves different states
def lay_out(pieces: tuple[StoredPiece, ...]) -> ShardLayout:
    """Lay out a shard file with these pieces. Raises ToolkitError for an unsupported type or number of dimensions."""
    # HDF5 writes only its own structures to the sparse file, which has holes in place of the data.
    with hdf5_in_memory(**ALIGNMENT) as (file, descriptor):
        file.attrs["format"] = "toolkit-shard 1"
        datasets = [describe(file, piece) for piece in pieces]  # all structures come first, so that they are adjacent
        starts = tuple(_allocate(dataset, piece) for dataset, piece in zip(datasets, pieces, strict=True))
        file.close()
        layout = ShardLayout(pieces, starts, (), os.fstat(descriptor).st_size)
        # Trailing zeros need not be stored, because all other bytes are zero anyway.
        gaps = ((first, os.pread(descriptor, end - first, first).rstrip(b"\0")) for first, end in layout.gaps())
        return replace(layout, structure=tuple((first, content) for first, content in gaps if content))


def describe(
    file: h5py.File, piece: StoredPiece, *, chunk: tuple[int, ...] = (), compression: Compression = "none"
) -> h5d.DatasetID:
    """Create a piece's dataset without data, with `compression` in chunks of shape `chunk`; errors as in `lay_out`."""
    check_dimensions(piece.shape, piece.name)
    group = file.require_group(group_path(piece.name))
    if not len(group):  # this is the first piece of its tensor
        group.attrs["dtype"] = piece.dtype
        _note(group.id, b"shape", piece.shape)
    properties = h5p.create(h5p.DATASET_CREATE)
    if compression == "none":
        properties.set_layout(h5d.CONTIGUOUS)
    else:
        properties.set_chunk(chunk)
        set_filters(properties, compression)
    properties.set_fill_time(h5d.FILL_TIME_NEVER)
    space = h5s.create_simple(piece.extent) if piece.extent else h5s.create(h5s.SCALAR)
    kind = element(piece.dtype, where=piece.name).file_type()
    dataset = h5d.create(group.id, dataset_name(piece.offset).encode(), kind, space, properties)
    _note(dataset, b"offset", piece.offset)
    return dataset


def _note(owner: h5g.GroupID | h5d.DatasetID, name: bytes, numbers: Sequence[int]) -> None:
    """Write an attribute of numbers, three times as fast as h5py's own method, for thousands of tensors."""
    values = np.array(numbers, "<i8")
    h5a.create(owner, name, h5t.STD_I64LE, h5s.create_simple(values.shape)).write(values)


def _allocate(dataset: h5d.DatasetID, piece: StoredPiece) -> int:
    """Allocate space for the data of a piece in the file, and return the offset of its first byte."""
    if not prod(piece.extent):
        return 0
    kind = element(piece.dtype, where=piece.name)
    space = dataset.get_space()
    if piece.extent:
        space.select_hyperslab((0,) * len(piece.extent), (1,) * len(piece.extent))
    # HDF5 allocates all bytes when the first element is written.
    one = np.zeros((1,) * len(piece.extent), kind.memory)
    dataset.write(h5s.create_simple(one.shape) if piece.extent else h5s.ALL, space, one, mtype=kind.file_type())
    return int(dataset.get_offset())

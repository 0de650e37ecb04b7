"""Writes `index.h5` for users: each tensor at its global shape, as a virtual HDF5 dataset over the shard files."""

import os
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5p, h5s

from toolkit.checkpoint.format.elements import element
from toolkit.checkpoint.format.layout import INDEX
from toolkit.checkpoint.format.manifest import Manifest, TensorRecord
from toolkit.checkpoint.format.output import hdf5_in_memory
from toolkit.checkpoint.format.shard_layout import dataset_name, escape, group_path
from toolkit.rundir.files import mode_of_files_in, write_bytes

__all__ = ["write_index"]


def write_index(folder: Path, manifest: Manifest) -> Path:
    """Write the index of a checkpoint into its folder, replacing an older one, and sync it to disk."""
    path = folder / INDEX
    write_bytes(path, index_of(manifest.tensors), mode=mode_of_files_in(folder))
    return path


def index_of(tensors: Mapping[str, TensorRecord]) -> bytes:
    """Return the content of the index file, which depends only on the offsets of the pieces."""
    with hdf5_in_memory() as (file, descriptor):
        file.attrs["format"] = "toolkit-index 1"
        group = file.create_group("tensors")
        for name, record in tensors.items():
            _write_virtual(group, name, record)
        file.close()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _write_virtual(group: h5py.Group, name: str, record: TensorRecord) -> None:
    kind = element(record.dtype, where=name)
    properties = h5p.create(h5p.DATASET_CREATE)
    if isinstance(kind.missing, float) or kind.missing:
        # HDF5 converts the fill value to the type of the dataset, including bfloat16.
        properties.set_fill_value(np.array(kind.missing))
    whole = h5s.create_simple(record.shape) if record.shape else h5s.create(h5s.SCALAR)
    for piece in record.pieces:
        if 0 in piece.shape:
            continue
        source = h5s.create_simple(piece.shape) if piece.shape else h5s.create(h5s.SCALAR)
        if piece.shape:
            whole.select_hyperslab(piece.offset, piece.shape)
        dataset = f"{group_path(name)}/{dataset_name(piece.offset)}"
        # HDF5 reads "%b" in these names as a block number.
        properties.set_virtual(whole, piece.file.encode(), dataset.replace("%", "%%").encode(), source)
    whole.select_all()
    dataset = h5py.Dataset(h5d.create(group.id, escape(name).encode(), kind.file_type(), whole, properties))
    dataset.attrs["dtype"] = record.dtype

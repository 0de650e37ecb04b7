"""`index.h5`: every tensor at its global shape, as a virtual dataset over the shard files.

For people and plotting tools; the loader never reads it. A missing shard file shows as NaN.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5p, h5s

from toolkit.checkpoint.commit import sync
from toolkit.checkpoint.elements import element
from toolkit.checkpoint.layout import INDEX
from toolkit.checkpoint.manifest import Manifest, TensorRecord
from toolkit.checkpoint.names import escape
from toolkit.checkpoint.output import new_hdf5_file
from toolkit.checkpoint.shards import dataset_name, group_path


def write_index(folder: Path, manifest: Manifest) -> Path:
    """Write the index of a checkpoint into its folder, in place of an older one, and bring it to the disk."""
    path = folder / INDEX
    path.unlink(missing_ok=True)
    with new_hdf5_file(path) as file:
        file.attrs["format"] = "toolkit-index 1"
        file.attrs["step"] = manifest.step
        tensors = file.create_group("tensors")
        for name, record in manifest.tensors.items():
            _write_virtual(tensors, name, record)
    sync(path)
    return path


def _write_virtual(group: h5py.Group, name: str, record: TensorRecord) -> None:
    kind = element(record.dtype, where=name)
    properties = h5p.create(h5p.DATASET_CREATE)
    if isinstance(kind.missing, float) or kind.missing:
        # HDF5 converts the value to the dataset's own type, bfloat16 included.
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

"""Checks that HDF5 shows the same tensors in a shard file as the manifest.

Loads use the manifest and never HDF5. Users' tools use HDF5: a file that was changed on purpose could show them other
bytes, another type, or the contents of another file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
from h5py import h5d

from toolkit.checkpoint.format.elements import element
from toolkit.checkpoint.format.filters import FILTER_NUMBERS
from toolkit.checkpoint.format.manifest import Manifest, Piece, TensorRecord
from toolkit.checkpoint.format.names import escape
from toolkit.checkpoint.format.shard_layout import dataset_name


def differing_pieces(folder: Path, file: str, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(tensor, problem) for each piece that HDF5 shows differently; ("", problem) if it cannot open the file."""
    # Through a Python file: if HDF5 opens it, a user's HDF5_USE_FILE_LOCKING=TRUE overrides `locking`.
    with (folder / file).open("rb") as stream:
        try:
            shard = h5py.File(stream, "r")
        except OSError as error:
            yield "", f"is not a valid HDF5 file: {error}"
            return
        yield from _differing(shard, file, manifest)


def _differing(shard: h5py.File, file: str, manifest: Manifest) -> Iterator[tuple[str, str]]:
    with shard:
        for name, record in manifest.tensors.items():
            for piece in record.pieces:
                if piece.file == file and (problem := _difference(shard, name, record, piece)):
                    yield name, problem


def _difference(shard: h5py.File, name: str, record: TensorRecord, piece: Piece) -> str:
    """How HDF5 shows a piece differently from the manifest; "" if it does not.

    Links are not followed: HDF5 would open another file, anywhere.
    """
    node: Any = shard
    try:
        for link in ("tensors", escape(name), dataset_name(piece.offset)):
            if not isinstance(node, h5py.Group) or not isinstance(node.get(link, getlink=True), h5py.HardLink):
                return f"HDF5 does not find {link} itself"
            node = node[link]
    except (KeyError, OSError, RuntimeError) as error:
        return f"HDF5 cannot read it: {error.args[0]}"
    if not isinstance(node, h5py.Dataset):
        return "HDF5 contains no dataset for it"
    if node.shape != piece.shape or not _has_same_bytes(node, piece):
        return "HDF5 shows it elsewhere than the manifest"
    if not node.id.get_type().equal(element(record.dtype).file_type()):
        return "HDF5 shows it as another type than the manifest"
    return ""


def _has_same_bytes(dataset: h5py.Dataset, piece: Piece) -> bool:
    """Whether HDF5 reads the same bytes for a piece, through the same filters."""
    properties = dataset.id.get_create_plist()
    filters = tuple(properties.get_filter(number)[0] for number in range(properties.get_nfilters()))
    if piece.chunks is None:
        return not filters and (not piece.size or dataset.id.get_offset() == piece.byte_offset)
    if dataset.chunks != piece.chunks.shape or filters != tuple(FILTER_NUMBERS[name] for name in piece.chunks.filters):
        return False
    stored: list[h5d.StoreInfo] = []
    dataset.id.chunk_iter(stored.append)
    ordered = sorted(stored, key=lambda chunk: chunk.chunk_offset)
    # The mask lists filters that were not applied to a chunk.
    return not any(chunk.filter_mask for chunk in ordered) and piece.chunks.places == tuple(
        (chunk.byte_offset, chunk.size) for chunk in ordered
    )

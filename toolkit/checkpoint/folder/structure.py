"""Whether HDF5 shows the same tensors in a shard file as the manifest does.

Loads go by the manifest and never ask HDF5. People's tools do: a file that somebody changed on purpose could show them
something else, of another type, or out of another file.
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
    """(tensor, what is wrong) for each piece that HDF5 shows otherwise; ("", what) where it shows nothing at all."""
    # Through a file of ours: in one that HDF5 opens, a user's HDF5_USE_FILE_LOCKING=TRUE counts more than `locking`.
    with (folder / file).open("rb") as stream:
        try:
            shard = h5py.File(stream, "r")
        except OSError as error:
            yield "", f"is no HDF5 file: {error}"
            return
        yield from _differing(shard, file, manifest)


def _differing(shard: h5py.File, file: str, manifest: Manifest) -> Iterator[tuple[str, str]]:
    with shard:
        for name, record in manifest.tensors.items():
            for piece in record.pieces:
                if piece.file == file and (wrong := _difference(shard, name, record, piece)):
                    yield name, wrong


def _difference(shard: h5py.File, name: str, record: TensorRecord, piece: Piece) -> str:
    """Why HDF5 would show another piece than the manifest; empty where it shows the same.

    Links are not followed: HDF5 would go into another file, wherever that lies.
    """
    place: Any = shard
    try:
        for link in ("tensors", escape(name), dataset_name(piece.offset)):
            if not isinstance(place, h5py.Group) or not isinstance(place.get(link, getlink=True), h5py.HardLink):
                return f"HDF5 does not find {link} itself"
            place = place[link]
    except (KeyError, OSError, RuntimeError) as error:
        return f"HDF5 does not give it: {error.args[0]}"
    if not isinstance(place, h5py.Dataset):
        return "HDF5 holds no dataset for it"
    if place.shape != piece.shape or not _lies_there(place, piece):
        return "HDF5 shows it elsewhere than the manifest"
    if not place.id.get_type().equal(element(record.dtype).file_type()):
        return "HDF5 shows it as another type than the manifest"
    return ""


def _lies_there(dataset: h5py.Dataset, piece: Piece) -> bool:
    """Whether HDF5 takes the same bytes for a piece, through the same filters."""
    properties = dataset.id.get_create_plist()
    filters = tuple(properties.get_filter(number)[0] for number in range(properties.get_nfilters()))
    if piece.chunks is None:
        return not filters and (not piece.size or dataset.id.get_offset() == piece.byte_offset)
    if dataset.chunks != piece.chunks.shape or filters != tuple(FILTER_NUMBERS[name] for name in piece.chunks.filters):
        return False
    found: list[h5d.StoreInfo] = []
    dataset.id.chunk_iter(found.append)
    ordered = sorted(found, key=lambda chunk: chunk.chunk_offset)
    # The mask tells of filters that a chunk did not go through.
    return not any(chunk.filter_mask for chunk in ordered) and piece.chunks.places == tuple(
        (chunk.byte_offset, chunk.size) for chunk in ordered
    )

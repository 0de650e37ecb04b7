"""Reads the items of a DCP load plan from a checkpoint's shard files into the tensors that the planner names."""

import io
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from toolkit.checkpoint.format.manifest import Manifest, Piece, TensorRecord
from toolkit.checkpoint.loading.shard_reader import ShardReader
from toolkit.checkpoint.loading.wanted import FileReads, WantedBox, reads_of
from toolkit.checkpoint.tensors import as_numpy, dtype_name, refuse_no_dict, shared_numpy
from toolkit.errors import ToolkitError

Blocks = Mapping[str, Collection[int]]  # of each shard file


@dataclass(frozen=True)
class _Place:
    """The target of an item; `buffer` is the target itself if the bytes can be read directly into it."""

    item: ReadItem
    target: torch.Tensor
    buffer: torch.Tensor


class PlannedLoad:
    """The part of a checkpoint that one rank reads. The constructor reads no bytes; `read` fills the tensors."""

    def __init__(self, folder: Path, manifest: Manifest, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Find the target of every item; ToolkitError if its kind of number differs from the checkpoint's."""
        self._folder = folder
        self._manifest = manifest
        self._planner = planner
        self._values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        self._places: list[_Place] = []
        boxes: dict[str, list[WantedBox]] = defaultdict(list)
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                file, box = self._box(item)
                boxes[file].append(box)
        self._reads: dict[str, FileReads] = {file: reads_of(of_file) for file, of_file in boxes.items()}

    def touched_blocks(self) -> dict[str, set[int]]:
        """The blocks of each shard file that `read` needs."""
        return {file: reads.touched() for file, reads in self._reads.items()}

    def read(self, *, threads: int = 1, checked_by_others: Blocks | None = None) -> int:
        """Fill the tensors and return the bytes read. After an error their contents are undefined.

        Raises CorruptCheckpointError for damage, and OwnFailureError if this host cannot read a file.
        """
        for item in self._values:
            packed = io.BytesIO()
            torch.save(self._manifest.objects[item.storage_index.fqn].value, packed)
            packed.seek(0)
            self._planner.load_bytes(item, packed)
        bytes_read = 0
        for file, reads in self._reads.items():
            with ShardReader(self._folder / file, self._manifest.file(file), threads=threads) as shard:
                shard.read(reads, checked_by_others=(checked_by_others or {}).get(file, ()))
                bytes_read += shard.bytes_read
        for place in self._places:
            if place.buffer is not place.target:
                place.target.copy_(place.buffer)
            self._planner.commit_tensor(place.item, place.target)
        return bytes_read

    def _box(self, item: ReadItem) -> tuple[str, WantedBox]:
        """The shard file of an item, and the box to read."""
        name = item.storage_index.fqn
        record = self._manifest.tensors[name]
        piece = piece_of(record, item.storage_index)
        target = self._planner.resolve_tensor(item).detach()
        stored: torch.dtype = getattr(torch, record.dtype)
        _check_conversion(name, stored, target.dtype)
        out = shared_numpy(target) if target.dtype == stored else None
        buffer = target
        if out is None:  # another type or device: a copy in between
            buffer = torch.empty(tuple(item.lengths), dtype=stored)
            out = as_numpy(buffer, name)
        self._places.append(_Place(item, target, buffer))
        return piece.file, WantedBox(piece, tuple(item.storage_offsets), out)


def planned_load(folder: Path, manifest: Manifest, tensors: dict[str, Any], planner: LoadPlanner) -> PlannedLoad:
    """The load that fills this rank's tensors, planned by DCP; ToolkitError for a missing or different tensor."""
    refuse_no_dict(tensors, "tensors")
    planner.set_up_planner(tensors, metadata_of(manifest), is_coordinator=False)
    return PlannedLoad(folder, manifest, planner.finish_plan(planner.create_local_plan()), planner)


def metadata_of(manifest: Manifest) -> dcp.Metadata:
    """A manifest as DCP's metadata."""
    records: dict[str, dcp.STORAGE_TYPES] = {
        name: _storage_metadata(record) for name, record in manifest.tensors.items()
    }
    records.update({name: dcp.BytesStorageMetadata() for name in manifest.objects})
    paths = {name: record.path for name, record in manifest.tensors.items()}
    paths.update({name: record.path for name, record in manifest.objects.items()})
    return dcp.Metadata(records, planner_data=paths, storage_data={})


def _storage_metadata(record: TensorRecord) -> dcp.TensorStorageMetadata:
    return dcp.TensorStorageMetadata(
        properties=dcp.TensorProperties(dtype=getattr(torch, record.dtype)),
        size=torch.Size(record.shape),
        chunks=[dcp.ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)) for piece in record.pieces],
    )


def piece_of(record: TensorRecord, index: dcp.MetadataIndex) -> Piece:
    """The piece of a read item of DCP."""
    offset = tuple(index.offset or ())
    if index.index is not None and record.pieces[index.index].offset == offset:
        return record.pieces[index.index]
    return next(piece for piece in record.pieces if piece.offset == offset)


def _check_conversion(name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    """Refuse another kind of number. The precision of floats may change between saving and loading."""
    if stored != wanted and not (stored.is_floating_point and wanted.is_floating_point):
        raise ToolkitError(
            f"is {dtype_name(stored)} in the checkpoint but {dtype_name(wanted)} in memory",
            where=name,
            fix=f"make the tensor {dtype_name(stored)}",
        )

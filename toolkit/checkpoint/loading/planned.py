"""Reads the items of a DCP load plan from the shard files of a checkpoint into the tensors of the planner."""

import io
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.manifest import Manifest, Piece, TensorRecord
from toolkit.checkpoint.loading.planner import put_value
from toolkit.checkpoint.loading.shard_reader import ShardReader
from toolkit.checkpoint.loading.wanted import FileReads, WantedBox, reads_of
from toolkit.checkpoint.tensors import as_numpy, dtype_name, is_unchanged, refuse_no_dict, shared_numpy
from toolkit.errors import ToolkitError

Blocks = Mapping[str, Collection[int]]  # block numbers by shard file


@dataclass(frozen=True)
class _Place:
    """The target of a read item; `buffer` is the target itself if the bytes can be read directly into it."""

    item: ReadItem
    target: torch.Tensor
    buffer: torch.Tensor


class PlannedLoad:
    """What one rank reads from a checkpoint. The constructor reads no data; `read` fills the tensors."""

    def __init__(self, folder: Path, manifest: Manifest, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Find the target of each item. Raises ToolkitError if its type cannot be converted from the checkpoint's."""
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
        """Return the blocks that `read` reads, by shard file."""
        return {file: reads.touched() for file, reads in self._reads.items()}

    def read(self, *, threads: int = 1, checked_by_others: Blocks | None = None) -> int:
        """Fill the tensors and return the number of bytes read. After an error the tensors are undefined.

        Raises CorruptCheckpointError for damage, and OwnFailureError if this host cannot read a file.
        """
        for item in self._values:
            name = item.storage_index.fqn
            _put(self._planner, item, jsonvalues.restored(self._manifest.objects[name].value, name))
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
        """Return the shard file of an item, and the box to read."""
        name = item.storage_index.fqn
        record = self._manifest.tensors[name]
        piece = piece_of(record, item.storage_index)
        target = self._planner.resolve_tensor(item).detach()
        stored: torch.dtype = getattr(torch, record.dtype)
        _check_conversion(name, stored, target.dtype)
        out = shared_numpy(target) if target.dtype == stored else None
        buffer = target
        if out is None:  # another type or device needs a copy in between
            buffer = torch.empty(tuple(item.lengths), dtype=stored)
            out = as_numpy(buffer, name)
        self._places.append(_Place(item, target, buffer))
        return piece.file, WantedBox(piece, tuple(item.storage_offsets), out)


def _put(planner: LoadPlanner, item: ReadItem, value: object) -> None:
    """Set a value in the state. DCP's own method would add a string as a key beside an integer key of a dict."""
    if is_unchanged(planner, DefaultLoadPlanner, "load_bytes"):
        assert isinstance(planner, DefaultLoadPlanner)
        path = planner.mappings[item.dest_index.fqn] if planner.flatten_state_dict else (item.dest_index.fqn,)
        put_value(planner.original_state_dict if planner.flatten_state_dict else planner.state_dict, path, value)
        return
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    planner.load_bytes(item, content)


def planned_load(folder: Path, manifest: Manifest, tensors: dict[str, Any], planner: LoadPlanner) -> PlannedLoad:
    """Plan this rank's load with DCP. Raises ToolkitError if a tensor is missing or has another shape."""
    refuse_no_dict(tensors, "tensors")
    planner.set_up_planner(tensors, metadata_of(manifest), is_coordinator=False)
    return PlannedLoad(folder, manifest, planner.finish_plan(planner.create_local_plan()), planner)


def metadata_of(manifest: Manifest) -> dcp.Metadata:
    """Convert a manifest to DCP metadata."""
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
    """Return the piece that a DCP read item refers to."""
    offset = tuple(index.offset or ())
    if index.index is not None and record.pieces[index.index].offset == offset:
        return record.pieces[index.index]
    return next(piece for piece in record.pieces if piece.offset == offset)


def _check_conversion(name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    """Raise a ToolkitError if the types differ, except for two float types: their precision may change."""
    if stored != wanted and not (stored.is_floating_point and wanted.is_floating_point):
        raise ToolkitError(
            f"is {dtype_name(stored)} in the checkpoint but {dtype_name(wanted)} in memory",
            where=name,
            fix=f"load it into a tensor of type {dtype_name(stored)}",
        )

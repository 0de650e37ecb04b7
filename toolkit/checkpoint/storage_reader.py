"""HDF5 storage for torch.distributed.checkpoint (DCP), the reading half.

    dcp.load(state, storage_reader=HDF5StorageReader(path))

DCP plans which boxes of which pieces a rank needs, on any number of ranks; only those are read.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from toolkit.checkpoint.layout import MANIFEST
from toolkit.checkpoint.manifest import Manifest, Piece, TensorRecord
from toolkit.checkpoint.manifest_file import read_manifest
from toolkit.checkpoint.shards import ShardReader
from toolkit.checkpoint.tensors import as_numpy, dtype_name
from toolkit.errors import ToolkitError


class HDF5StorageReader(StorageReader):
    """Reads one checkpoint folder, on any number of ranks.

    Every block that any rank's slices touch is checked against its digest before any rank reads: a damaged
    checkpoint leaves the tensors as they were. `manifest` saves reading it again.
    """

    def __init__(self, path: str | os.PathLike[str], *, manifest: Manifest | None = None) -> None:
        self._path = Path(path)
        self._manifest = manifest
        self._shards: dict[str, ShardReader] = {}

    @property
    def checkpoint_id(self) -> str:
        """The folder, for DCP's log."""
        return str(self._path)

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's manifest, read once."""
        if self._manifest is None:
            self._manifest = read_manifest(self._path)
        return self._manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another folder from now on."""
        if checkpoint_id:
            self._path = Path(checkpoint_id)
            self._manifest = None
            self._shards = {}

    def read_metadata(self) -> dcp.Metadata:
        """DCP's metadata, out of the manifest."""
        # With **kwargs in the signature DCP would try again, for metadata of one rank, which we have not.
        manifest = self.manifest
        records: dict[str, dcp.STORAGE_TYPES] = {
            name: _storage_metadata(record) for name, record in manifest.tensors.items()
        }
        records.update({name: dcp.BytesStorageMetadata() for name in manifest.objects})
        paths = {name: record.path for name, record in manifest.tensors.items()}
        paths.update({name: record.path for name, record in manifest.objects.items()})
        return dcp.Metadata(records, planner_data=paths, storage_data={})

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the manifest says it all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check every block that this rank will touch. DCP goes on to `read_data` when no rank has failed here."""
        for file, boxes in self._boxes_by_file(plan).items():
            with self._shard(file) as shard:
                for item, piece in boxes:
                    name = item.storage_index.fqn
                    record = self.manifest.tensors[name]
                    shard.check(name, record, piece, item.storage_offsets, item.lengths)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to plan globally."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's boxes, one shard file after the other."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                packed = io.BytesIO()
                torch.save(self.manifest.objects[item.storage_index.fqn].value, packed)
                packed.seek(0)
                planner.load_bytes(item, packed)
        for file, boxes in self._boxes_by_file(plan).items():
            with self._shard(file) as shard:
                for item, piece in boxes:
                    self._read_box(shard, item, piece, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _boxes_by_file(self, plan: LoadPlan) -> dict[str, list[tuple[ReadItem, Piece]]]:
        """The plan's boxes of tensors with the piece of each, in the order of their bytes in the file."""
        found: dict[str, list[tuple[ReadItem, Piece]]] = defaultdict(list)
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                piece = self._piece(item.storage_index)
                found[piece.file].append((item, piece))
        for boxes in found.values():
            boxes.sort(key=lambda box: box[1].byte_offset)
        return found

    def _shard(self, file: str) -> ShardReader:
        """The reader of one file, kept so that no block is checked twice."""
        if file not in self._shards:
            self._shards[file] = ShardReader(self._path / file, self.manifest.file(file))
        return self._shards[file]

    def _piece(self, index: dcp.MetadataIndex) -> Piece:
        pieces = self.manifest.tensors[index.fqn].pieces
        if index.index is not None and pieces[index.index].offset == tuple(index.offset or ()):
            return pieces[index.index]
        return next(piece for piece in pieces if piece.offset == tuple(index.offset or ()))

    def _read_box(self, shard: ShardReader, item: ReadItem, piece: Piece, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        record = self.manifest.tensors[name]
        target = planner.resolve_tensor(item).detach()
        stored = getattr(torch, record.dtype)
        _check_conversion(name, stored, target.dtype)
        direct = target.device.type == "cpu" and target.dtype == stored and target.is_contiguous()
        # A copy in between only where the bytes cannot go straight to their place.
        buffer = target if direct else torch.empty(tuple(item.lengths), dtype=stored)
        shard.read(name, record, piece, item.storage_offsets, as_numpy(buffer, name))
        if not direct:
            target.copy_(buffer)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the folder holds a checkpoint of this format."""
        return (Path(checkpoint_id) / MANIFEST).is_file()


def _storage_metadata(record: TensorRecord) -> dcp.TensorStorageMetadata:
    return dcp.TensorStorageMetadata(
        properties=dcp.TensorProperties(dtype=getattr(torch, record.dtype)),
        size=torch.Size(record.shape),
        chunks=[dcp.ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)) for piece in record.pieces],
    )


def _check_conversion(name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    """Precision may change between saving and loading; what kind of number it is may not."""
    if stored != wanted and not (stored.is_floating_point and wanted.is_floating_point):
        raise ToolkitError(
            f"is {dtype_name(stored)} in the checkpoint and {dtype_name(wanted)} in memory",
            where=name,
            fix=f"make the tensor {dtype_name(stored)}",
        )

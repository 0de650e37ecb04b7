"""HDF5 storage for torch.distributed.checkpoint (DCP).

DCP plans, removes duplicates and reshards; these two classes only write and read boxes of tensors:

    dcp.save(state, storage_writer=HDF5StorageWriter(path))
    dcp.load(state, storage_reader=HDF5StorageReader(path))

Each rank writes one shard file; rank 0 then writes the manifest and renames the folder, which commits it.
Nothing is pickled on disk: values that are not tensors are stored as JSON.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

import toolkit
from toolkit.checkpoint import jsonvalues
from toolkit.checkpoint.commit import commit, open_part, refuse_existing, sync
from toolkit.checkpoint.digests import digests_of_file
from toolkit.checkpoint.elements import element
from toolkit.checkpoint.index import write_index
from toolkit.checkpoint.layout import MANIFEST, digest_name, part_folder, shard_name
from toolkit.checkpoint.manifest import (
    FileRecord,
    Manifest,
    ObjectRecord,
    Piece,
    TensorRecord,
    manifest_text,
    read_manifest,
)
from toolkit.checkpoint.shards import ShardReader, ShardWriter
from toolkit.errors import OwnFailureError, ToolkitError


@dataclass(frozen=True)
class _Place:
    """Which rank of how many writes a plan."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class _Written:
    """What one rank tells the coordinator of one item: a piece in its files, or a value."""

    piece: Piece | None = None
    files: tuple[FileRecord, ...] = ()
    value: Any = None


class HDF5StorageWriter(StorageWriter):
    """Writes one checkpoint folder.

    Args:
        path: the committed folder, which must not exist. It is written as `<path>.part-<attempt>`.
        step, attempt, state, mesh: recorded in the manifest; `state` is JSON (of the coordinator).
        replace: put an older checkpoint of the same name out of the way when this one is complete.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int = 0,
        attempt: int = 0,
        state: dict[str, Any] | None = None,
        mesh: list[dict[str, Any]] | None = None,
        replace: bool = False,
    ) -> None:
        self._replace = replace
        self._final = Path(path)
        self._step = step
        self._attempt = attempt
        self._state = state or {}
        self._mesh = mesh or []
        self._world_size = 1

    @property
    def checkpoint_id(self) -> str:
        """The folder, for DCP's log."""
        return str(self._final)

    @property
    def _part(self) -> Path:
        return part_folder(self._final, self._attempt)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write to another folder from now on."""
        if checkpoint_id:
            self._final = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The coordinator makes the part folder. Only it may: a rank that was given up on and whose folder was
        renamed must fail, not make it again."""
        if not kwargs.get("use_collectives", True):
            raise ToolkitError(
                "HDF5 checkpoints need collectives", fix="call dcp.save with use_collectives=True"
            )
        if is_coordinator:
            if not self._replace:
                refuse_existing(self._final)
            open_part(self._final, self._attempt)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to plan locally."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank its shard file's number."""
        self._world_size = len(plans)
        return [replace(plan, storage_data=_Place(rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard file and its digests, and bring both to the disk.

        A rank without tensors to write makes no file.
        """
        place: _Place = plan.storage_data
        name = shard_name(place.rank, place.world_size)
        values = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        results = [self._written_value(item, planner) for item in values]
        if tensors:
            with ShardWriter(self._part / name) as shard:
                pieces = [self._written_piece(shard, name, item, planner) for item in tensors]
            files = self._finish_shard(name)
            results += [
                replace(result, storage_data=replace(result.storage_data, files=files)) for result in pieces
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _written_value(self, item: WriteItem, planner: SavePlanner) -> WriteResult:
        """A value that is not a tensor, out of the bytes in which DCP hands it over."""
        name = item.index.fqn
        data = planner.resolve_data(item)
        assert isinstance(data, io.BytesIO)
        data.seek(0)
        value = _unpickled(data, name)
        jsonvalues.encode(value, name)
        return WriteResult(item.index, data.getbuffer().nbytes, _Written(value=value))

    def _written_piece(
        self, shard: ShardWriter, file: str, item: WriteItem, planner: SavePlanner
    ) -> WriteResult:
        assert item.tensor_data is not None
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        name, chunk = item.index.fqn, item.tensor_data.chunk
        data = as_numpy(tensor, name)
        dtype = dtype_name(tensor.dtype)
        start = shard.write(name, dtype, item.tensor_data.size, chunk.offsets, data)
        piece = Piece(file, tuple(chunk.offsets), tuple(chunk.sizes), start)
        return WriteResult(item.index, data.nbytes, _Written(piece=piece))

    def _finish_shard(self, name: str) -> tuple[FileRecord, ...]:
        """Digest the shard while its bytes are in the page cache and go to the disk."""
        path = self._part / name
        with ThreadPoolExecutor(1) as pool:
            synced = pool.submit(sync, path)
            digests = digests_of_file(path)
            synced.result()
        digest_path = path.with_name(digest_name(name))
        digest_path.write_text(digests.text(), encoding="ascii")
        sync(digest_path)
        own = digests_of_file(digest_path)
        return (
            FileRecord(name, digests.size, digests.whole),
            FileRecord(digest_path.name, own.size, own.whole),
        )

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks wrote: index, manifest, commit."""
        manifest = self._manifest(metadata, results)
        for file in manifest.files:
            if (found := (self._part / file.name).stat().st_size) != file.size:
                raise OwnFailureError(f"has {found} bytes, its rank wrote {file.size}", where=file.name)
        write_index(self._part, manifest)
        path = self._part / MANIFEST
        path.write_text(manifest_text(manifest), encoding="ascii")
        sync(path)
        commit(self._part, self._final, self._attempt, replace=self._replace)

    def _manifest(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> Manifest:
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        pieces: dict[str, list[Piece]] = defaultdict(list)
        objects: dict[str, ObjectRecord] = {}
        files: dict[str, FileRecord] = {}
        for result in (result for of_rank in results for result in of_rank):
            name, written = result.index.fqn, result.storage_data
            if written.piece is None:
                objects[name] = ObjectRecord(tuple(paths.get(name, (name,))), written.value)
                continue
            pieces[name].append(written.piece)
            files.update({file.name: file for file in written.files})
        tensors = {
            name: TensorRecord(
                dtype=dtype_name(record.properties.dtype),
                shape=tuple(record.size),
                path=tuple(paths.get(name, (name,))),
                pieces=tuple(pieces[name]),
            )
            for name, record in metadata.state_dict_metadata.items()
            if isinstance(record, dcp.TensorStorageMetadata)
        }
        return Manifest(
            step=self._step,
            attempt=self._attempt,
            world_size=self._world_size,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            written_by=f"toolkit {toolkit.__version__}, torch {torch.__version__}",
            mesh=self._mesh,
            state=self._state,
            objects=objects,
            tensors=tensors,
            files=tuple(sorted(files.values(), key=lambda file: file.name)),
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True


class HDF5StorageReader(StorageReader):
    """Reads one checkpoint folder, on any number of ranks.

    Every block that a rank's slices touch is checked against its digest before it is read. `manifest` saves reading
    it again.
    """

    def __init__(self, path: str | os.PathLike[str], *, manifest: Manifest | None = None) -> None:
        self._path = Path(path)
        self._manifest = manifest

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

    def read_metadata(self) -> dcp.Metadata:
        """DCP's metadata, out of the manifest."""
        # Without **kwargs in the signature DCP does not try again for metadata of one rank, which we have not.
        manifest = self.manifest
        records: dict[str, dcp.STORAGE_TYPES] = {
            name: _storage_metadata(record) for name, record in manifest.tensors.items()
        }
        records.update({name: dcp.BytesStorageMetadata() for name in manifest.objects})
        paths = {name: record.path for name, record in manifest.tensors.items()}
        paths.update({name: record.path for name, record in manifest.objects.items()})
        return dcp.Metadata(records, planner_data=paths, storage_data={})

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up: the manifest says it all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to plan locally."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to plan globally."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's boxes, one shard file after the other."""
        by_file: dict[str, list[tuple[ReadItem, Piece]]] = defaultdict(list)
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                packed = io.BytesIO()
                torch.save(self.manifest.objects[name].value, packed)
                packed.seek(0)
                planner.load_bytes(item, packed)
            else:
                piece = self._piece(item.storage_index)
                by_file[piece.file].append((item, piece))
        for file, wanted in by_file.items():
            shard = ShardReader(self._path / file, self.manifest.file(file))
            try:
                for item, piece in sorted(wanted, key=lambda pair: pair[1].byte_offset):
                    self._read_box(shard, item, piece, planner)
            finally:
                shard.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

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
        chunks=[
            dcp.ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
            for piece in record.pieces
        ],
    )


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name of a type: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def as_numpy(tensor: torch.Tensor, name: str) -> np.ndarray:
    """A tensor as numpy of its element's `memory` type, C-contiguous; shares memory where it can.

    Raises:
        ToolkitError: for element types and layouts that the format does not hold.
    """
    kind = element(dtype_name(tensor.dtype), where=name)
    if tensor.layout != torch.strided:
        raise ToolkitError(
            f"layout {tensor.layout} cannot be stored", where=name, fix="call .to_dense() first"
        )
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    shape = tuple(plain.shape)
    # Through bytes: numpy has no bfloat16 and torch no view of it that numpy would take.
    return plain.reshape(-1).view(torch.uint8).numpy().view(kind.memory).reshape(shape)


def _check_conversion(name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    """Precision may change between saving and loading; what kind of number it is may not."""
    if stored != wanted and not (stored.is_floating_point and wanted.is_floating_point):
        raise ToolkitError(
            f"is {dtype_name(stored)} in the checkpoint and {dtype_name(wanted)} in memory",
            where=name,
            fix=f"make the tensor {dtype_name(stored)}",
        )


def _unpickled(data: io.BytesIO, name: str) -> Any:
    """The value that DCP pickled a moment ago in this process; only plain values pass."""
    try:
        return torch.load(data, weights_only=True)
    except Exception as error:
        raise ToolkitError(
            "is neither a tensor nor a plain value, and cannot be stored in a checkpoint",
            where=name,
            fix="keep numbers, strings, lists, tuples and dicts in the state",
        ) from error

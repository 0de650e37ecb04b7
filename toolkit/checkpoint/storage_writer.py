"""HDF5 storage for torch.distributed.checkpoint (DCP), the writing half.

    dcp.save(state, storage_writer=HDF5StorageWriter(path))

DCP plans and removes duplicates. Each rank writes one shard file; rank 0 then writes the manifest and
renames the folder, which commits it. Nothing is pickled on disk: values that are not tensors are JSON.
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

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import toolkit
from toolkit.checkpoint import jsonvalues
from toolkit.checkpoint.commit import commit, open_part, refuse_existing, refuse_given_up, sync
from toolkit.checkpoint.digests import digests_of_file
from toolkit.checkpoint.index import write_index
from toolkit.checkpoint.layout import MANIFEST, digest_name, part_folder, shard_name
from toolkit.checkpoint.manifest import FileRecord, Manifest, ObjectRecord, Piece, TensorRecord
from toolkit.checkpoint.manifest_file import manifest_text
from toolkit.checkpoint.shards import ShardWriter, open_shard
from toolkit.checkpoint.tensors import as_numpy, dtype_name
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.files import mode_of_files_in, write_text

# All ranks wait while the coordinator writes the index, some 10 microseconds for each piece. Larger
# checkpoints do without, until somebody asks for it with `toolkit ckpt index`.
_INDEX_PIECES = 50_000


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
        replace: when this checkpoint is complete, put one of the same name, and those of later steps, out of
            the way.
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
        """The coordinator makes the part folder.

        Only it may: a rank that was given up on, and whose folder was renamed, must fail, not make it again.
        """
        if not kwargs.get("use_collectives", True):
            raise ToolkitError("HDF5 checkpoints need collectives", fix="call dcp.save with use_collectives=True")
        if is_coordinator:
            if self._replace:
                refuse_given_up(self._final.parent, self._attempt)
            else:
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
            with open_shard(self._part / name) as shard:
                pieces = [self._written_piece(shard, name, item, planner) for item in tensors]
            files = self._finish_shard(name)
            results += [replace(result, storage_data=replace(result.storage_data, files=files)) for result in pieces]
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

    def _written_piece(self, shard: ShardWriter, file: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
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
        write_text(digest_path, digests.text(), mode=mode_of_files_in(self._part))
        own = digests_of_file(digest_path)
        return (FileRecord(name, digests.size, digests.whole), FileRecord(digest_path.name, own.size, own.whole))

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks wrote: index, manifest, commit."""
        manifest = self._manifest(metadata, results)
        for file in manifest.files:
            if (found := (self._part / file.name).stat().st_size) != file.size:
                raise OwnFailureError(f"has {found} bytes, its rank wrote {file.size}", where=file.name)
        if sum(len(record.pieces) for record in manifest.tensors.values()) <= _INDEX_PIECES:
            write_index(self._part, manifest)
        write_text(self._part / MANIFEST, manifest_text(manifest), mode=mode_of_files_in(self._part))
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

"""HDF5 storage writer for DCP (torch): `dcp.save(state, storage_writer=HDF5StorageWriter(path))`.

Each rank writes one shard file; rank 0 then writes the manifest and renames the folder, which commits it.
"""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from toolkit.checkpoint.boxes import chunk_of
from toolkit.checkpoint.folder.commit import open_part, put_back, refuse_existing, refuse_foreign
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.filters import Compression, check_compression
from toolkit.checkpoint.format.layout import MANIFEST, folder_of_rank, new_token, parts_of, shard_name, step_of
from toolkit.checkpoint.format.shard_layout import lay_out
from toolkit.checkpoint.saving.compressed_shard import Place, write_compressed
from toolkit.checkpoint.saving.finish import Description, finish_save, write_digests
from toolkit.checkpoint.saving.plan import StoredShare, stored_piece, whole_plan
from toolkit.checkpoint.saving.shard_writer import write_shard
from toolkit.checkpoint.tensors import bytes_of, is_unchanged, rank_here, written_by
from toolkit.errors import OwnFailureError, ToolkitError


@dataclass
class _Place:
    """A rank and their number, the folder, and what `FileSystemWriter` reads in a plan. DCP may cache the plan."""

    rank: int
    world_size: int
    part: Path
    prefix: str
    is_used: bool = False  # by the save that planned it: a later save has another folder


@dataclass(frozen=True)
class _Written:
    """What one rank reports to the coordinator: its pieces and their places, its file's digests, and its values."""

    share: StoredShare
    places: Sequence[Place]
    files: bytes
    values: dict[str, Any]


class HDF5StorageWriter(StorageWriter):
    """Writes one checkpoint folder. Raises ToolkitError if a compression library is not installed.

    Args:
        path: the committed folder, which must not exist. It is written as `<path>.part-<attempt>-<number>`.
        overwrite: replace an existing checkpoint, which stays readable until the new one is complete.
        step: recorded in the manifest; default: the step of a folder named `step-XXXXXXXX`, else 0.
        attempt, state, mesh: recorded in the manifest, with the coordinator's values; `state` is JSON.
        threads: the number of writer threads per rank.
        compression: compression of the tensors; "zstd" requires the pip extra `zstd`, both to save and to load.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        step: int | None = None,
        attempt: int = 0,
        state: dict[str, Any] | None = None,
        mesh: list[dict[str, Any]] | None = None,
        threads: int = 1,
        compression: Compression = "none",
    ) -> None:
        check_compression(compression)
        self._compression = compression
        self._step = step
        self._path, self._rank = Path(path), 0
        self._description = Description(
            self._path, written_by(), self._step_in(self._path), attempt, new_token(), state or {}, mesh or [],
            overwrite=overwrite,
        )  # fmt: skip
        self._threads = threads

    @property
    def checkpoint_id(self) -> str:
        """The folder as a string, which DCP logs."""
        return str(self._path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another folder, if one is given."""
        if checkpoint_id:
            self._path = Path(checkpoint_id)
            self._description = replace(self._description, final=self._path, step=self._step_in(self._path))

    def _step_in(self, final: Path) -> int:
        """Return the step to record. It must match the folder name, because a mismatch would count as damage."""
        named = step_of(final)
        if self._step is not None and named is not None and self._step != named:
            raise ToolkitError(
                f"is named after step {named}, but `step` is {self._step}",
                where=str(final),
                fix="omit `step`, or name the folder after this step",
            )
        return (named or 0) if self._step is None else self._step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Create the part folder on the coordinator only, so that ranks fail if a later attempt has renamed it.

        Without collectives, each rank writes a checkpoint of its own in a subfolder of the path.
        """
        self._rank = kwargs.get("rank", 0)
        is_alone = not kwargs.get("use_collectives", True)
        final = folder_of_rank(self._path, rank_here()) if is_alone else self._path
        self._description = replace(self._description, final=final)
        if is_alone or is_coordinator:
            if self._description.overwrite:
                put_back(final, self._description.attempt)
                refuse_foreign(final)
            else:
                refuse_existing(final)
            if is_alone:
                refuse_existing(self._path / MANIFEST)
            open_part(final, self._description.attempt, self._description.token)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Pass each rank the number of ranks and the part folder, whose name only the coordinator knows."""
        part = self._description.part
        places = [_Place(rank, len(plans), part, f"__{rank}_") for rank in range(len(plans))]
        return [replace(plan, storage_data=place) for plan, place in zip(plans, places, strict=True)]

    def _folder_and_size(self, planned: object) -> tuple[Path, int]:
        """Return the part folder, and the number of ranks. A cached plan is of an earlier save or another storage."""
        final, attempt = self._description.final, self._description.attempt
        parts = parts_of(final, attempt)
        size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else self._rank + 1
        if isinstance(planned, _Place):
            self._rank, size = planned.rank, planned.world_size
            if not planned.is_used:
                planned.is_used = True
                parts = [part for part in parts if part == planned.part]
        if len(parts) != 1:
            message = f"expected the folder of this save, got {len(parts)} named {final.name}.part-{attempt}-*"
            raise OwnFailureError(message, where=str(final.parent), fix="let only one job save here, and save again")
        return parts[0], size

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's shard file and its digests. A rank without tensors writes no file."""
        part, world_size = self._folder_and_size(plan.storage_data)
        file = shard_name(self._rank, world_size)
        values = {
            item.index.fqn: _plain_value(item, planner) for item in plan.items if item.type == WriteItemType.BYTE_IO
        }
        items = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        data = [_bytes_to_store(item, planner) for item in items]
        layout = lay_out(tuple(map(stored_piece, items)))
        path = part / file
        places: Sequence[Place] = layout.starts
        files = b""
        if items and self._compression == "none":
            files = write_digests(path, write_shard(path, layout, data, threads=self._threads))
        elif items:
            digests, places = write_compressed(path, layout.pieces, data, self._compression, threads=self._threads)
            files = write_digests(path, digests)
        written = _Written((file, layout.pieces, layout.starts), places, files, values)
        # DCP passes the list to `finish` unchanged, so one entry suffices.
        results = [WriteResult(dcp.MetadataIndex(file), layout.data_bytes, written)]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and the manifest and commit, on the coordinator after all ranks have written."""
        written: list[_Written] = [result.storage_data for of_rank in results for result in of_rank]
        plan = whole_plan([rank.share for rank in written], metadata)
        if self._compression != "none":
            plan = plan.placed((*rank.share[:2], rank.places) for rank in written)
        values = {name: value for rank in written for name, value in rank.values.items()}
        finish_save(self._description, plan, {rank.share[0]: rank.files for rank in written if rank.files}, values)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True for any path."""
        return True


def _bytes_to_store(item: WriteItem, planner: SavePlanner) -> memoryview:
    """Return the bytes of a part. Raises ToolkitError if torch's planner gave a wrong offset or shape (see `boxes`)."""
    name = item.index.fqn
    tensor: torch.Tensor = planner.resolve_data(item)  # type: ignore[assignment]
    assert item.tensor_data is not None
    planned = item.tensor_data.chunk
    expected = f"{list(planned.sizes)} at {list(planned.offsets)}"
    actual = f"{list(tensor.shape)}"
    value = getattr(planner, "state_dict", {}).get(name)
    is_right = tensor.shape == planned.sizes
    if is_right and isinstance(value, DTensor) and tensor.numel():
        chunk = chunk_of(value, name)
        is_right = chunk.offsets == planned.offsets
        actual += f" at {list(chunk.offsets)}"
    if not is_right:
        raise ToolkitError(
            f"the plan expects a part of shape {expected}, got {actual}",
            where=name,
            fix="save with `Checkpointer`, or pass `planner=toolkit.checkpoint.SavePlanner()` to dcp.save",
        )
    return bytes_of(tensor, name)


def _plain_value(item: WriteItem, planner: SavePlanner) -> Any:
    """Return a copy of a non-tensor value. Raises ToolkitError if a checkpoint cannot contain it."""
    name = item.index.fqn
    if is_unchanged(planner, DefaultSavePlanner, "resolve_data", "transform_object"):
        assert isinstance(planner, DefaultSavePlanner)
        return jsonvalues.copied(planner.lookup_object(item.index), name)
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    data.seek(0)
    try:
        value = torch.load(data, weights_only=True)  # this process has just pickled it
    except Exception as error:
        raise ToolkitError(
            "the planner returned bytes that torch.load(weights_only=True) does not accept",
            where=name,
            fix="return bytes of torch.save with only tensors, numbers, strings, lists, tuples and dicts",
        ) from error
    return jsonvalues.copied(value, name)

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
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from toolkit.checkpoint.boxes import chunk_of
from toolkit.checkpoint.folder.commit import open_part, refuse_existing
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.filters import Compression, check_compression
from toolkit.checkpoint.format.layout import new_token, shard_name, step_of
from toolkit.checkpoint.format.shard_layout import lay_out
from toolkit.checkpoint.saving.compressed_shard import Place, write_compressed
from toolkit.checkpoint.saving.finish import Description, finish_save, write_digests
from toolkit.checkpoint.saving.plan import StoredShare, stored_piece, whole_plan
from toolkit.checkpoint.saving.shard_writer import write_shard
from toolkit.checkpoint.tensors import bytes_of, written_by
from toolkit.errors import ToolkitError


@dataclass(frozen=True)
class _Place:
    """The rank that executes a plan, the number of ranks, and the folder to write to."""

    rank: int
    world_size: int
    part: Path


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
        step: recorded in the manifest; default: the step of a folder named `step-XXXXXXXX`, else 0.
        attempt, state, mesh: recorded in the manifest, with the coordinator's values; `state` is JSON.
        threads: the number of writer threads per rank.
        compression: compression of the tensors; "zstd" requires the pip extra `zstd`, both to save and to load.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
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
        self._description = Description(
            Path(path), written_by(), self._step_in(Path(path)), attempt, new_token(), state or {}, mesh or []
        )
        self._threads = threads

    @property
    def checkpoint_id(self) -> str:
        """The folder as a string, which DCP logs."""
        return str(self._description.final)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another folder, if one is given."""
        if checkpoint_id:
            final = Path(checkpoint_id)
            self._description = replace(self._description, final=final, step=self._step_in(final))

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
        """Create the part folder on the coordinator only, so that ranks fail if a later attempt has renamed it."""
        if not kwargs.get("use_collectives", True):
            raise ToolkitError("HDF5 checkpoints require collectives", fix="call dcp.save with use_collectives=True")
        if is_coordinator:
            refuse_existing(self._description.final)
            open_part(self._description.final, self._description.attempt, self._description.token)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Pass each rank its shard number and the part folder, whose name only the coordinator knows."""
        part = self._description.part
        return [replace(plan, storage_data=_Place(rank, len(plans), part)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's shard file and its digests. A rank without tensors writes no file."""
        place: _Place = plan.storage_data
        if not place.part.is_dir():
            raise ToolkitError(
                "expected a plan of this save, got the cached plan of an earlier save",
                where=str(self._description.final),
                fix="omit enable_plan_caching, or save with `Checkpointer`, which caches plans itself",
            )
        file = shard_name(place.rank, place.world_size)
        values = {
            item.index.fqn: _plain_value(item, planner) for item in plan.items if item.type == WriteItemType.BYTE_IO
        }
        items = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        data = [_bytes_to_store(item, planner) for item in items]
        layout = lay_out(tuple(map(stored_piece, items)))
        path = place.part / file
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
    """Decode a non-tensor value from DCP's bytes. Raises ToolkitError unless it is a plain value."""
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    data.seek(0)
    try:
        value = torch.load(data, weights_only=True)  # this process has just pickled it
    except Exception as error:
        raise ToolkitError(
            "is neither a tensor nor a plain value, so a checkpoint cannot contain it",
            where=item.index.fqn,
            fix="put only tensors, numbers, strings, lists, tuples and dicts into the state",
        ) from error
    jsonvalues.encode(value, item.index.fqn)
    return value

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
    """The rank that writes a plan, the number of ranks, and the folder."""

    rank: int
    world_size: int
    part: Path


@dataclass(frozen=True)
class _Written:
    """The result of one rank for the coordinator: the pieces of its shard file, the file, and its values."""

    share: StoredShare
    places: Sequence[Place]
    files: bytes
    values: dict[str, Any]


class HDF5StorageWriter(StorageWriter):
    """Writes one checkpoint folder; ToolkitError if a library of the compression is not installed.

    Args:
        path: the committed folder, which must not exist. It is written as `<path>.part-<attempt>-<number>`.
        step: recorded in the manifest; default: the step of a folder named `step-XXXXXXXX`, else 0.
        attempt, state, mesh: recorded in the manifest; `state` is JSON (of the coordinator).
        threads: the number of threads of each rank that write.
        compression: compression of the tensors; "zstd" requires the extra of that name, to save and to load.
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
        """The folder, for DCP's log."""
        return str(self._description.final)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write to another folder from now on."""
        if checkpoint_id:
            final = Path(checkpoint_id)
            self._description = replace(self._description, final=final, step=self._step_in(final))

    def _step_in(self, final: Path) -> int:
        """The step for the manifest. A folder that is named after another step would count as damaged."""
        named = step_of(final)
        if self._step is not None and named is not None and self._step != named:
            raise ToolkitError(
                f"is named after step {named}, but `step` is {self._step}",
                where=str(final),
                fix="omit `step`, or save under the name of the step",
            )
        return (named or 0) if self._step is None else self._step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Create the part folder, on the coordinator: a rank whose folder a later attempt renamed must fail."""
        if not kwargs.get("use_collectives", True):
            raise ToolkitError("HDF5 checkpoints require collectives", fix="call dcp.save with use_collectives=True")
        if is_coordinator:
            refuse_existing(self._description.final)
            open_part(self._description.final, self._description.attempt, self._description.token)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank its shard file's number, and the part folder, whose name only the coordinator knows."""
        part = self._description.part
        return [replace(plan, storage_data=_Place(rank, len(plans), part)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's shard file and its digests; without tensors, no file."""
        place: _Place = plan.storage_data
        if not place.part.is_dir():
            raise ToolkitError(
                "got the plan of an earlier save",
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
        """Write index and manifest and commit, on the coordinator after all ranks wrote."""
        written: list[_Written] = [result.storage_data for of_rank in results for result in of_rank]
        plan = whole_plan([rank.share for rank in written], metadata)
        if self._compression != "none":
            plan = plan.placed((*rank.share[:2], rank.places) for rank in written)
        values = {name: value for rank in written for name, value in rank.values.items()}
        finish_save(self._description, plan, {rank.share[0]: rank.files for rank in written if rank.files}, values)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for any path."""
        return True


def _bytes_to_store(item: WriteItem, planner: SavePlanner) -> memoryview:
    """The bytes of a part; ToolkitError if torch's planner misplaced it in the plan (see `boxes`)."""
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
            f"expected a part of {expected} by the plan, got {actual}",
            where=name,
            fix="save with `Checkpointer`, or pass dcp.save `planner=toolkit.checkpoint.SavePlanner()`",
        )
    return bytes_of(tensor, name)


def _plain_value(item: WriteItem, planner: SavePlanner) -> Any:
    """A value other than a tensor from DCP's bytes; accepts only plain values."""
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    data.seek(0)
    try:
        value = torch.load(data, weights_only=True)  # pickled a moment ago in this process
    except Exception as error:
        raise ToolkitError(
            "is neither a tensor nor a plain value, and cannot be stored in a checkpoint",
            where=item.index.fqn,
            fix="keep numbers, strings, lists, tuples and dicts in the state",
        ) from error
    jsonvalues.encode(value, item.index.fqn)
    return value

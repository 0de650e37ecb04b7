"""Saves on all ranks in two phases: the first needs the tensors of training, the second can run in the background."""

import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.folder.commit import make_checkpoints_folder, open_part
from toolkit.checkpoint.folder.writer_lock import hold_folder, refuse_others
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.filters import Compression
from toolkit.checkpoint.format.shard_layout import StoredPiece
from toolkit.checkpoint.saving.compressed_shard import Place, write_compressed
from toolkit.checkpoint.saving.finish import WRITTEN_BYTES, Description, WholePlan, finish_save, write_digests
from toolkit.checkpoint.saving.node_file import write_with_node
from toolkit.checkpoint.saving.plan import FlatState, RankPlan, SavePlanning
from toolkit.checkpoint.saving.shard_writer import write_shard
from toolkit.checkpoint.saving.staging import StagingBuffer
from toolkit.checkpoint.tensors import bytes_of, refuse_no_dict
from toolkit.comm.agreement import Ranks
from toolkit.errors import OwnFailureError

_MOST_THREADS = 4
# What one rank wrote: its shard file, its pieces, their places, and the result of `write_digests`.
_CompressedShare = tuple[str, Sequence[StoredPiece], Sequence[Place], bytes]


@dataclass(frozen=True)
class PreparedSave:
    """The second phase of a save. If `data` returns copies, training may change its tensors meanwhile."""

    description: Description
    mine: RankPlan
    whole: WholePlan | None
    values: dict[str, Any]
    data: Callable[[], Sequence[memoryview]]
    compression: Compression = "none"

    def write(self, ranks: Ranks, *, threads: int) -> None:
        """Write and commit on all ranks. After a failure all ranks raise the same RankFailure."""
        if self.compression == "none":
            ranks.collect(lambda: self._write_own(ranks, threads), WRITTEN_BYTES, self._finish)
        else:
            # The places of the pieces are known only now, and their number varies.
            shares = ranks.gather_objects(ranks.together(lambda: self._write_compressed(threads)))
            ranks.together(lambda: self._finish_compressed(shares) if ranks.rank == 0 else None)

    def _write_own(self, ranks: Ranks, threads: int) -> bytes:
        mine = self.mine
        if not mine.layout.pieces:  # a rank without tensors writes no file
            return bytes(WRITTEN_BYTES)
        path = self.description.part / mine.file
        if mine.is_of_node:
            digests = write_with_node(path, mine.layout, mine.own, self.data, ranks)
        else:
            digests = write_shard(path, mine.layout, self.data(), threads=threads)
        return write_digests(path, digests) if digests else bytes(WRITTEN_BYTES)

    def _write_compressed(self, threads: int) -> _CompressedShare:
        file, pieces = self.mine.file, self.mine.layout.pieces
        if not pieces:
            return file, (), (), b""
        path = self.description.part / file
        digests, places = write_compressed(path, pieces, self.data(), self.compression, threads=threads)
        return file, pieces, places, write_digests(path, digests)

    def _finish_compressed(self, shares: Sequence[_CompressedShare]) -> None:
        assert self.whole is not None
        plan = self.whole.placed((file, pieces, places) for file, pieces, places, _ in shares)
        files = {file: written for file, _, _, written in shares if written}
        finish_save(self.description, plan, files, self.values)

    def _finish(self, written: list[bytes]) -> None:
        assert self.whole is not None
        files = {file: packed for file, packed in zip(self.whole.files_of_ranks, written, strict=True) if any(packed)}
        finish_save(self.description, self.whole, files, self.values)


def prepare(
    description: Description,
    tensors: dict[str, Any],
    planning: SavePlanning,
    ranks: Ranks,
    *,
    staging: StagingBuffer | None = None,
    spare: Path | None = None,
    compression: Compression = "none",
) -> PreparedSave:
    """Create the part folder, plan if the shape of the state has changed since the last save, and collect the data.

    `staging` copies the tensors; without it they must not change until the save is written. `spare`, on rank 0, is the
    folder of a removed checkpoint, whose files are overwritten. Raises the same RankFailure on every rank.
    """

    kept = description

    def begin() -> tuple[FlatState, bool]:
        nonlocal kept
        refuse_no_dict(tensors, "tensors")
        if ranks.rank == 0:  # the state of the other ranks is ignored
            refuse_no_dict(description.state, "state")
        state = planning.flatten(tensors)
        if staging is not None and ranks.rank == 0:  # training may change its lists and dicts, too
            kept = replace(description, state=deepcopy(description.state))
        if ranks.rank == 0:
            directory = description.final.parent
            refuse_others(directory, description.attempt)
            make_checkpoints_folder(directory)
            hold_folder(directory, description.attempt)
            open_part(description.final, description.attempt, description.token, spare=spare)
        return state, planning.is_new(state)

    state, is_new = ranks.together_any(begin)
    if is_new:
        planning.plan(state)
    mine = planning.mine
    assert mine is not None
    values = _values_of_all(state, mine, ranks) if mine.any_values else {}
    kept = replace(kept, mesh=planning.meshes)
    return PreparedSave(kept, mine, planning.whole, values, _data_of(state, mine, staging), compression)


def _values_of_all(state: FlatState, mine: RankPlan, ranks: Ranks) -> dict[str, Any]:
    """Return copies of the non-tensor values of all ranks, on rank 0."""

    def plain() -> dict[str, Any]:
        return {name: jsonvalues.copied(state.planner.state_dict[name], name) for name in mine.values}

    return {name: value for of_rank in ranks.gather_objects(ranks.together(plain)) for name, value in of_rank.items()}


def _data_of(state: FlatState, mine: RankPlan, staging: StagingBuffer | None) -> Callable[[], Sequence[memoryview]]:
    """Return a function that returns the bytes of this rank's pieces, or raises the error of a tensor."""

    def tensors() -> list[tuple[str, torch.Tensor]]:
        return [(item.index.fqn, state.planner.resolve_data(item)) for item in mine.items]  # type: ignore[misc]

    if staging is None:
        return lambda: _as_planned([bytes_of(tensor, name) for name, tensor in tensors()], mine)
    # An error is raised later, in the collective phase: the other ranks can receive it only there.
    try:
        staged = staging.stage(tensors())
    except Exception as error:  # noqa: BLE001
        failure = error

        def fail() -> Sequence[memoryview]:
            raise failure

        return fail
    return lambda: _as_planned(staged, mine)


def _as_planned(data: Sequence[memoryview], mine: RankPlan) -> Sequence[memoryview]:
    """Return the data. Raises OwnFailureError if a size differs from the plan: a local part may not fit its DTensor."""
    for number, view in zip(mine.own, data, strict=True):
        piece = mine.layout.pieces[number]
        if len(view) != piece.size_bytes:
            raise OwnFailureError(
                f"the plan expects {piece.size_bytes} bytes on this rank, got {len(view)}",
                where=piece.name,
                fix="make the local part match the placements of the DTensor",
            )
    return data


def threads_for(ranks: Ranks) -> int:
    """Return the number of reader or writer threads of this rank: its fraction of the CPUs that it may use."""
    mine = len(os.sched_getaffinity(0)) // ranks.sharing_cpus
    return max(1, min(mine, _MOST_THREADS))

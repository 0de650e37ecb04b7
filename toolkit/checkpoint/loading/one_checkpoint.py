"""Loads one checkpoint into the tensors of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.checkpoint.errors import CorruptCheckpointError, load_error
from toolkit.checkpoint.folder.choice import good_manifest, others_beside
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.manifest import Manifest
from toolkit.checkpoint.loading.planned import LoadTarget, PlannedLoad, planned_load
from toolkit.checkpoint.loading.shared_checks import share_of_checks
from toolkit.comm.agreement import Ranks
from toolkit.comm.rank_failure import RankFailure

__all__ = ["LoadedCheckpoint"]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of `load`. `world_size` is the number of ranks that saved `state`.

    `missing` names the optional tensors that the checkpoint lacks. `bytes_read` counts the bytes that this rank read
    from shard files.
    """

    step: int
    state: dict[str, Any]
    world_size: int
    path: Path
    missing: tuple[str, ...] = ()
    bytes_read: int = 0


class Plan(NamedTuple):
    """What this rank reads from a checkpoint.

    `missing` names what the checkpoint lacks, `others` contains the blocks by shard file that other ranks check.
    """

    manifest: Manifest
    load: PlannedLoad
    missing: tuple[str, ...]
    others: dict[str, set[int]]


def plan_on_all(
    ranks: Ranks, folder: Path, manifest: Callable[[], Manifest], wanted: LoadTarget, before: Callable[[Manifest], None]
) -> Plan:
    """Read the manifest, call `before` and plan the load on each rank; read no data.

    After a failure all ranks raise the same error: that of `manifest` or `before`, or ToolkitError if a tensor is missing
    or has another shape.
    """
    planned: list[tuple[Manifest, PlannedLoad, tuple[str, ...]]] = []  # other ranks receive only the blocks

    def plan() -> dict[str, set[int]]:
        known = manifest()
        before(known)
        planned.append((known, *planned_load(folder, known, wanted)))
        return planned[0][1].touched_blocks()

    try:
        of_node = ranks.together_on_node(plan)
        return Plan(*planned[0], share_of_checks(of_node, ranks.place_on_node))
    except RankFailure as failure:
        raise load_error(folder, failure) from failure


def fill_on_all(ranks: Ranks, folder: Path, plan: Plan, wanted: LoadTarget) -> LoadedCheckpoint:
    """Fill the tensors on all ranks. After a failure all ranks raise the same error: CorruptCheckpointError for damage."""
    try:
        bytes_read = ranks.together(lambda: plan.load.read(threads=wanted.threads, checked_by_others=plan.others))
    except RankFailure as failure:
        raise load_error(folder, failure) from failure
    state = jsonvalues.restored(plan.manifest.state, "state")
    return LoadedCheckpoint(plan.manifest.step, state, plan.manifest.world_size, folder, plan.missing, bytes_read)


def load_exactly(
    ranks: Ranks, source: Path, wanted: LoadTarget, *, before: Callable[[Manifest], None] = lambda _: None
) -> LoadedCheckpoint:
    """Call `before` on each rank, then fill the tensors of all ranks from a folder that the user named.

    The fix of a CorruptCheckpointError names the checkpoints in the same folder that pass the quick check.
    """
    try:
        manifest = ranks.from_rank_zero(lambda: good_manifest(source))
        return fill_on_all(ranks, source, plan_on_all(ranks, source, lambda: manifest, wanted, before), wanted)
    except CorruptCheckpointError as error:
        fix = ranks.from_rank_zero(lambda: others_beside(source))
        place = f"{Path(error.where).name}: " if error.where else ""
        message = f"checkpoint {source.name} is damaged: {place}{error.message}"
        raise CorruptCheckpointError(message, where=str(source.parent), fix=fix) from None

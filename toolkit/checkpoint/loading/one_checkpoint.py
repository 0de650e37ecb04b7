"""Loads one checkpoint into the tensors of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.errors import CorruptCheckpointError, load_error
from toolkit.checkpoint.folder.choice import good_manifest, others_beside
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.manifest import Manifest
from toolkit.checkpoint.loading.planned import planned_load
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


@dataclass(frozen=True)
class Wanted:
    """The target of a load: `tensors`, the `optional` keys that a checkpoint may lack, and the number of `threads`."""

    tensors: dict[str, Any]
    optional: tuple[str, ...]
    threads: int


def load_one(ranks: Ranks, folder: Path, manifest: Manifest, wanted: Wanted) -> LoadedCheckpoint:
    """Fill the tensors on all ranks. After a failure all ranks raise the same error.

    Raises ToolkitError if a tensor is missing or has another shape, and CorruptCheckpointError for damage.
    """
    try:
        planned, missing = ranks.together(lambda: planned_load(folder, manifest, wanted.tensors, wanted.optional))
        touched = planned.touched_blocks()
        of_node = ranks.exchange_on_node(touched)
        others = share_of_checks(touched, of_node, ranks.place_on_node)
        bytes_read = ranks.together(lambda: planned.read(threads=wanted.threads, checked_by_others=others))
    except RankFailure as failure:
        raise load_error(folder, failure) from failure
    state = jsonvalues.restored(manifest.state, "state")
    return LoadedCheckpoint(manifest.step, state, manifest.world_size, folder, missing, bytes_read)


def load_exactly(
    ranks: Ranks, source: Path, wanted: Wanted, *, before: Callable[[Manifest], None] | None = None
) -> LoadedCheckpoint:
    """Call `before` on all ranks, then load as in `load_one` from a folder that the user named.

    The fix of a CorruptCheckpointError names the checkpoints in the same folder that pass the quick check.
    """
    try:
        manifest = ranks.from_rank_zero(lambda: good_manifest(source))
        if before is not None:
            before(manifest)
        return load_one(ranks, source, manifest, wanted)
    except CorruptCheckpointError as error:
        fix = ranks.from_rank_zero(lambda: others_beside(source))
        place = f"{Path(error.where).name}: " if error.where else ""
        message = f"checkpoint {source.name} is damaged: {place}{error.message}"
        raise CorruptCheckpointError(message, where=str(source.parent), fix=fix) from None

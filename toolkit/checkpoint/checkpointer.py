"""Saves the checkpoints of a run, loads the newest undamaged one, and removes surplus ones.

The constructor, `save` and `load` are collective. An error on any rank is raised on all of them, and does not change
the last good checkpoint.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from toolkit.checkpoint.errors import save_error
from toolkit.checkpoint.folder.choice import step_of_any
from toolkit.checkpoint.folder.commit import take_over
from toolkit.checkpoint.folder.deletion import await_deletions, discard, discard_at_end, discard_later
from toolkit.checkpoint.folder.retention import Retention, retain
from toolkit.checkpoint.folder.writer_lock import refuse_others
from toolkit.checkpoint.format.filters import Compression, check_compression
from toolkit.checkpoint.format.layout import committed_steps, new_token, part_folder, step_folder
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.checkpoint.loading.falling_back import FallingBack
from toolkit.checkpoint.loading.one_checkpoint import LoadedCheckpoint, load_exactly
from toolkit.checkpoint.loading.planned import LoadTarget
from toolkit.checkpoint.saving.background import Background, OnEnd
from toolkit.checkpoint.saving.finish import Description
from toolkit.checkpoint.saving.plan import SavePlanning
from toolkit.checkpoint.saving.prepared import PreparedSave, prepare, threads_for
from toolkit.checkpoint.saving.staging import StagingBuffer
from toolkit.checkpoint.tensors import written_by
from toolkit.comm.agreement import Ranks, RanksLostError
from toolkit.comm.rank_failure import RankFailure
from toolkit.errors import ToolkitError
from toolkit.terminal.talk import say_beside
from toolkit.world.facts import World

__all__ = ["Checkpointer"]

_DELETIONS_S = 60.0  # maximum wait of a save for deletions; all ranks wait, so it is far below a collective timeout


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause garbage collection during a save or load, while all ranks wait."""
    # Allocating the thousands of small objects of a plan or manifest would trigger collections that visit all objects.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Checkpointer:
    """Saves to and loads from one `checkpoints` folder. Create one per run: its process groups last as long as torch's.

    Args:
        directory: the `checkpoints` folder of the run; created by the first save.
        world: this rank. If there are several ranks, torch's default process group must be initialized.
        keep_last: the number of committed checkpoints to keep, at least 1.
        retention: rules for which checkpoints to keep, instead of `keep_last`; the loaded one is always kept.
        aggregate: "rank" for one shard file per rank, "node" for one per node.
        compression: requires `aggregate="rank"`; "zstd" also requires the pip extra `zstd`, both to save and to load.

    Raises:
        ToolkitError: a compression library is not installed, or compression is combined with `aggregate="node"`.
    """

    def __init__(
        self,
        directory: Path,
        world: World,
        *,
        keep_last: int = 3,
        retention: Retention | None = None,
        aggregate: Literal["rank", "node"] = "rank",
        compression: Compression = "none",
    ) -> None:
        check_compression(compression)
        if compression != "none" and aggregate == "node":
            # Each rank would need the compressed sizes of the other ranks before it could write.
            raise ToolkitError(
                'compression requires aggregate = "rank", got "node"',
                fix='set aggregate = "rank", or compression = "none"',
            )
        self._compression = compression
        self._directory = Path(directory)
        self._attempt = world.attempt
        self._retention = retention or Retention(keep_last)
        self._ranks = Ranks(world)
        self._aside: Ranks | None = None  # separate process groups for background saves
        self._planning = SavePlanning(self._ranks, by_node=aggregate == "node")
        self._staging = StagingBuffer()
        self._background = Background()
        self._in_use: frozenset[int] = frozenset()
        self._at_step: int | None = None
        self._spare: Path | None = None
        self._world = world
        self._token = self._ranks.from_rank_zero(self._begin)

    def _begin(self) -> int:
        take_over(self._directory, self._attempt)
        return new_token()

    def latest(self) -> int | None:
        """Return the newest committed step. Not collective."""
        return max(committed_steps(self._directory), default=None)

    def keys(self, source: Path | None = None) -> frozenset[str]:
        """Return the tensor names in a checkpoint (default: the newest), none without a checkpoint. Not collective."""
        if source is None:
            step = self.latest()
            if step is None:
                return frozenset()
            source = step_folder(self._directory, step)
        return frozenset(read_manifest(source).tensors)

    @torch.no_grad()  # otherwise each access to a DTensor adds an autograd node
    @_gc_paused()
    def save(self, step: int, tensors: dict[str, Any], state: dict[str, Any]) -> Path:
        """Save on all ranks, after any running background save, and return the committed folder.

        Does nothing if this object saved or loaded `step` last. Replaces an older checkpoint of `step` once the new one
        is complete. Renames checkpoints of later steps, which the run has abandoned, to `step-X.left-<attempt>`.

        Args:
            step: the number of completed optimizer steps.
            tensors: nested dicts of tensors and DTensors. Replicated ones are stored once; a key that only one rank has
                is stored by that rank.
            state: a dict of plain values; only the one of rank 0 is saved.

        Raises:
            ToolkitError: a rank failed in this save or in the background save before it; the same on every rank.
        """
        self.wait()
        if not self._is_saved(step):
            with self._agree_on_error(step):
                prepared = self._prepare(step, tensors, state)
                prepared.write(self._ranks, threads=threads_for(self._ranks))
            self._saved(step)
        return step_folder(self._directory, step)

    @torch.no_grad()  # otherwise each access to a DTensor adds an autograd node
    @_gc_paused()
    def save_in_background(
        self,
        step: int,
        tensors: dict[str, Any],
        state: dict[str, Any],
        *,
        when_busy: Literal["wait", "skip"] = "wait",
        on_end: OnEnd | None = None,
    ) -> bool:
        """Copy the state on all ranks, and save the copy as in `save` while training continues; False if skipped.

        Call `wait` after the last save.

        Args:
            when_busy: if any rank is still saving, all ranks either wait for that save or skip this one.
            on_end: called in another thread, with None after the commit or with the error of the save.

        Raises:
            ToolkitError: the state cannot be saved, or the save before this one failed; the same on every rank.
        """
        if when_busy not in ("wait", "skip"):
            raise ToolkitError(
                f'expected "wait" or "skip", got {when_busy!r}', where="when_busy", fix="pass one of these two"
            )
        if when_busy == "skip" and self.is_any_busy():
            return False
        self.wait()
        if self._is_saved(step):
            if on_end is not None:
                on_end(None)
            return True
        if self._aside is None:
            self._aside = Ranks(self._world)
        ranks = self._aside
        with self._agree_on_error(step):
            prepared = self._prepare(step, tensors, state, staging=self._staging)

            def work() -> None:
                with self._agree_on_error(step, ranks):
                    prepared.write(ranks, threads=1)  # training uses the other cores
                self._saved(step)

            self._background.start(work, on_end, agree=self._ranks.together)
        return True

    def is_any_busy(self) -> bool:
        """Return whether any rank is saving in the background; the same result on all. Collective."""
        return self._ranks.together_any(lambda: (None, self._background.is_busy))[1]

    @property
    def save_failed(self) -> bool:
        """Whether a background save failed on this rank; `wait`, or the next save, raises the error."""
        return self._background.has_failed

    def wait(self) -> None:
        """Wait for the background save on all ranks. Raises its ToolkitError on all ranks, or RanksLostError."""
        self._background.wait()

    def _is_saved(self, step: int) -> bool:
        if not isinstance(step, int) or step < 0:
            raise ToolkitError(
                f"expected a step number, got {step!r}", where="step", fix="pass the number of completed steps"
            )
        if step != self._at_step:
            return False
        return self._ranks.from_rank_zero(lambda: step in committed_steps(self._directory))

    def _prepare(
        self, step: int, tensors: dict[str, Any], state: dict[str, Any], staging: StagingBuffer | None = None
    ) -> PreparedSave:
        final = step_folder(self._directory, step)
        if self._ranks.rank == 0:
            await_deletions(_DELETIONS_S)  # the last save replaced a checkpoint; this one may need its space
        description = Description(final, written_by(), step, self._attempt, self._token, state, replace=True)
        spare, self._spare = self._spare, None
        return prepare(
            description,
            tensors,
            self._planning,
            self._ranks,
            staging=staging,
            spare=spare,
            compression=self._compression,
        )

    @contextmanager
    def _agree_on_error(self, step: int, ranks: Ranks | None = None) -> Iterator[None]:
        """If any of `ranks` (default: those of training) fails, raise its error on all and delete the part folder."""
        try:
            with self._adding_last_good(step):
                yield
        except RankFailure as failure:
            with self._adding_last_good(step):
                cause, last_good = (ranks or self._ranks).from_rank_zero(partial(self._why_failed, failure))
            if self._ranks.rank == 0:  # this frees disk space; the other ranks need not wait for it
                discard(part_folder(step_folder(self._directory, step), self._attempt, self._token))
            raise save_error(self._directory, step, last_good, RankFailure.from_json(cause)) from failure

    @contextmanager
    def _adding_last_good(self, step: int) -> Iterator[None]:
        """If ranks are lost, add the last good checkpoint to the error message, as this rank sees it."""
        try:
            yield
        except RanksLostError as lost:
            message = f"{lost.message} while step {step} was saved; {self._last_good()}"
            raise RanksLostError(message, where=str(self._directory), fix=lost.fix) from lost

    def _why_failed(self, failure: RankFailure) -> tuple[str, str]:
        """Return the cause of a failed save and the last good checkpoint, which rank 0 determines for all ranks."""
        # An attempt that takes over during a save renames its folder, so that the first error is only a missing file.
        try:
            with suppress(OSError):  # the same disk made the save fail, with a more specific error
                refuse_others(self._directory, self._attempt)
        except ToolkitError as error:
            failure = RankFailure(0, error)
        return failure.to_json(), self._last_good()

    def _last_good(self) -> str:
        try:
            last = self.latest()
        except ToolkitError as error:
            return error.message
        return "there is no earlier checkpoint" if last is None else f"step {last} is the last good checkpoint"

    def _saved(self, step: int) -> None:
        self._at_step = step
        if self._ranks.rank == 0:
            self._retain()

    @torch.no_grad()  # otherwise each access to a DTensor adds an autograd node
    @_gc_paused()
    def load(
        self,
        tensors: dict[str, Any],
        *,
        source: Path | None = None,
        optional: Iterable[str] = (),
        newer_than: Path | None = None,
        otherwise: Path | None = None,
    ) -> LoadedCheckpoint | None:
        """Fill `tensors` in place on all ranks from `source` or the newest undamaged checkpoint. Returns None if none.

        Renames a damaged checkpoint of the run to `step-X.bad-<attempt>`, logs the problem, and tries the next older
        one. After an error the contents of `tensors` are undefined.

        Args:
            tensors: as in `save`; the number of ranks and the placement of tensors may have changed.
            source: a checkpoint folder; no other one is tried, and it is not renamed if it is damaged.
            newer_than: a checkpoint folder; of this run's checkpoints only those of later steps are tried. If it
                belongs to another run, all are tried.
            otherwise: a checkpoint folder to load if the run has no checkpoint.
            optional: keys that the checkpoint may lack, such as "random.rank-00003", or "random" for all keys below it.
                Values that it lacks do not change.

        Raises:
            ToolkitError: a tensor is missing or has another shape; the same on every rank.
            OwnFailureError: a damaged checkpoint may have overwritten a large tensor that the next older one lacks.
                The next attempt loads the older one.
            CorruptCheckpointError: `source`, `otherwise`, or all checkpoints of the run are damaged.
        """
        self.wait()
        self._at_step = None  # from here on, the state of training changes
        wanted = LoadTarget(tensors, tuple(optional), threads_for(self._ranks))
        if source is not None:
            loaded: LoadedCheckpoint | None = load_exactly(self._ranks, Path(source), wanted)
        else:
            after = self._step_of_own(newer_than)
            falling = FallingBack(self._ranks, self._directory, self._attempt, wanted, after=after)
            loaded = falling.load_newest()
            if loaded is not None:
                self._at_step = loaded.step
            elif otherwise is not None:
                loaded = falling.load_instead(Path(otherwise))
            else:
                falling.load_nothing(may_forget=newer_than is not None)
        if loaded is not None:
            self._in_use = frozenset({self._step_of_own(loaded.path)})
        return loaded

    def release_loaded(self) -> None:
        """Let the following save remove the checkpoint that was loaded, if no rule of retention keeps it."""
        self._in_use = frozenset()

    def _step_of_own(self, folder: Path | None) -> int:
        """Return the step of a checkpoint folder of this run; -1 for None or a folder of another run."""
        step = step_of_any(folder) if folder is not None else None
        if folder is None or step is None or folder.parent.resolve() != self._directory.resolve():
            return -1
        return step

    def _retain(self) -> None:
        """Remove surplus checkpoints, on rank 0. Only logs errors, because the new checkpoint is already committed."""
        try:
            gone = retain(self._directory, self._retention, self._attempt, self._in_use)
        except Exception as error:  # noqa: BLE001 - the other ranks would not receive the error
            say_beside(f"older checkpoints in {self._directory} could not be removed: {error}")
            return
        for folder in gone[:-1]:
            discard_later(folder)
        if gone:  # the next save overwrites these files, which takes half as long as writing new ones
            self._spare = gone[-1]
            discard_at_end(gone[-1])

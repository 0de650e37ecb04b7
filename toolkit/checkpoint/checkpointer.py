"""A run's checkpoints: save, load the newest good one, keep the last few.

Making one, `save` and `load` are collective. An error on any rank is the same error on all of them, and
leaves the last good checkpoint as it was.
"""

from __future__ import annotations

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
from toolkit.checkpoint.loading.one_checkpoint import LoadedCheckpoint, Wanted, load_exactly
from toolkit.checkpoint.saving.background import Background, OnEnd
from toolkit.checkpoint.saving.finish import Description
from toolkit.checkpoint.saving.plan import SavePlanning
from toolkit.checkpoint.saving.prepared import PreparedSave, prepare, threads_for
from toolkit.checkpoint.saving.staging import StagingBuffer
from toolkit.checkpoint.tensors import written_by
from toolkit.comm.agreement import Ranks, RanksLostError
from toolkit.comm.rank_failure import RankFailure
from toolkit.errors import ToolkitError
from toolkit.talk import say_beside
from toolkit.world.facts import World

_DELETIONS_S = 60.0  # all ranks wait so long at most, far less than a collective may take


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Delay garbage collection while a save or a load keeps all ranks waiting."""
    # Plans and manifests are thousands of small objects, and every few thousand start a walk through all of torch's.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Checkpointer:
    """The checkpoints in one folder. Make one for a run: with several ranks, its process groups live as long as torch's.

    Args:
        directory: the run's `checkpoints` folder; made when the first checkpoint is.
        world: this rank. With more than one, torch's default process group must be initialised.
        keep_last: committed checkpoints that stay, at least 1.
        retention: which stay, in place of `keep_last`. The one that this object loaded stays whatever it says.
        aggregate: how many shard files a checkpoint has, one for each rank or one for each node.
        compression: of the tensors, with one shard file for each rank; "zstd" needs the extra of that name, to save and
            to load.

    Raises:
        ToolkitError: what the compression needs is not installed, or nodes have one file each.
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
            # Each rank would have to know how far the others' data shrink before it can write.
            raise ToolkitError("compressed checkpoints have a file for each rank", fix='leave aggregate at "rank"')
        self._compression = compression
        self._directory = Path(directory)
        self._attempt = world.attempt
        self._retention = retention or Retention(keep_last)
        self._ranks = Ranks(world)
        self._aside: Ranks | None = None  # the ranks' exchanges for saves in the background
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
        """The newest committed step. Not collective."""
        return max(committed_steps(self._directory), default=None)

    def keys(self, source: Path | None = None) -> frozenset[str]:
        """Names of the tensors in a checkpoint, by default the newest; empty without one. Not collective."""
        if source is None:
            step = self.latest()
            if step is None:
                return frozenset()
            source = step_folder(self._directory, step)
        return frozenset(read_manifest(source).tensors)

    @torch.no_grad()  # or each look into a DTensor makes a node of a graph
    @_gc_paused()
    def save(self, step: int, tensors: dict[str, Any], state: dict[str, Any]) -> Path:
        """Save on all ranks and return the committed folder. A save in the background is waited for first.

        The step that this object saved or loaded last is kept as it is. An older checkpoint of the same
        step is replaced once the new one is complete. Checkpoints of later steps belong to a line that the
        run has left; they are renamed to `step-X.left-<attempt>`.

        Args:
            step: optimizer steps done.
            tensors: nested dicts of tensors and DTensors. Replicated ones are stored once; a key that only
                one rank has is stored by that rank.
            state: JSON, of rank 0.

        Raises:
            ToolkitError: the same on every rank, when any rank could not save, now or in the background before.
        """
        self.wait()
        if not self._is_saved(step):
            with self._agree_on_error(step):
                prepared = self._prepare(step, tensors, state)
                prepared.write(self._ranks, threads=threads_for(self._ranks))
            self._saved(step)
        return step_folder(self._directory, step)

    @torch.no_grad()  # or each look into a DTensor makes a node of a graph
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
        """Copy the state, on all ranks, and return; the copy is saved as `save` does it while training goes on.

        One save at a time: where the last one is not done, this waits for it, or skips its own. Whoever ends without
        another save calls `wait`.

        Args:
            when_busy: what to do on all ranks when any rank's last save goes on.
            on_end: hears, in another thread, that this save is committed, or of its error.

        Returns:
            Whether the step is or will be saved: False when it was skipped.

        Raises:
            ToolkitError: the same on every rank, when the state cannot be saved, or the save before this one failed.
        """
        if when_busy not in ("wait", "skip"):
            raise ToolkitError(f"{when_busy!r} is no answer", where="when_busy", fix='give "wait" or "skip"')
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
                    prepared.write(ranks, threads=1)  # the other cores are the training's
                self._saved(step)

            self._background.start(work, on_end, agree=self._ranks.together)
        return True

    def is_any_busy(self) -> bool:
        """Whether a save in the background goes on, on any rank; the same answer on all. Collective."""
        return self._ranks.together_any(lambda: (None, self._background.is_busy))[1]

    @property
    def save_failed(self) -> bool:
        """A save in the background has failed on this rank and nobody was told: `wait`, or the next save, raises it."""
        return self._background.has_failed

    def wait(self) -> None:
        """Wait for the save in the background, on all ranks.

        Raises:
            ToolkitError: the same on every rank, when it failed.
            RanksLostError: another rank has ended meanwhile; each that is left tells what it saw.
        """
        self._background.wait()

    def _is_saved(self, step: int) -> bool:
        if not isinstance(step, int) or step < 0:
            raise ToolkitError(f"{step!r} is no step", where="step", fix="give the optimizer steps done, 0 or more")
        if step != self._at_step:
            return False
        return self._ranks.from_rank_zero(lambda: step in committed_steps(self._directory))

    def _prepare(
        self, step: int, tensors: dict[str, Any], state: dict[str, Any], staging: StagingBuffer | None = None
    ) -> PreparedSave:
        final = step_folder(self._directory, step)
        if self._ranks.rank == 0:
            await_deletions(_DELETIONS_S)  # of what the save before this one replaced: a disk may be nearly full
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
        """A failure of any rank as the one error of all; nothing of the save stays.

        Args:
            ranks: whose exchanges serve, by default the training's.
        """
        try:
            with self._told_of_the_lost(step):
                yield
        except RankFailure as failure:
            with self._told_of_the_lost(step):
                cause, kept = (ranks or self._ranks).from_rank_zero(partial(self._why_failed, failure))
            if self._ranks.rank == 0:  # what was written may fill the disk; the others need not wait for its end
                discard(part_folder(step_folder(self._directory, step), self._attempt, self._token))
            raise save_error(self._directory, step, kept, RankFailure.from_json(cause)) from failure

    @contextmanager
    def _told_of_the_lost(self, step: int) -> Iterator[None]:
        """That a rank ended in the middle of a save, with what stands in the folder as this rank sees it."""
        try:
            yield
        except RanksLostError as lost:
            message = f"{lost.message} while step {step} was saved; {self._what_stands()}"
            raise RanksLostError(message, where=str(self._directory), fix=lost.fix) from lost

    def _why_failed(self, failure: RankFailure) -> tuple[str, str]:
        """On rank 0: why a save failed, for all, and what stands in the folder."""
        # Whoever is overtaken in the middle of a save meets a missing file first, as its folder was renamed.
        try:
            with suppress(OSError):  # the disk that fails now has failed the save, which says more
                refuse_others(self._directory, self._attempt)
        except ToolkitError as error:
            failure = RankFailure(0, error)
        return failure.to_json(), self._what_stands()

    def _what_stands(self) -> str:
        try:
            last = self.latest()
        except ToolkitError as error:
            return error.message
        return "there is no earlier checkpoint" if last is None else f"step {last} is the last good checkpoint"

    def _saved(self, step: int) -> None:
        self._at_step = step
        if self._ranks.rank == 0:
            self._retain()

    @torch.no_grad()  # or each look into a DTensor makes a node of a graph
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
        """Fill `tensors` in place, on all ranks, from the newest checkpoint that is good, or from `source`.

        A checkpoint of the run that is found damaged is moved to `step-X.bad-<attempt>`, what was wrong is
        said on stderr, and the one before it is tried. A damaged `source` is an error and stays where it is.
        After an error `tensors` hold nothing that may be used.

        Args:
            tensors: as in `save`; the number of ranks, and how tensors lie on them, may have changed.
            source: a checkpoint folder; this one and no other.
            newer_than: a checkpoint; of the run's own only those of later steps are tried. Where it is another
                run's, all are.
            otherwise: a checkpoint folder, which is loaded where the run has none to load.
            optional: keys that the checkpoint need not hold: "random.rank-00003", or "random" for all below. Those
                that it does not hold stay as they are.

        Returns:
            None when there is no checkpoint, or none newer than `newer_than`; the tensors are as they were.

        Raises:
            ToolkitError: when a tensor is missing or of another shape, the same on every rank.
            OwnFailureError: when a damaged checkpoint may have written into a large tensor that the one before it lacks.
                The next attempt loads that one.
            CorruptCheckpointError: when `source` or `otherwise` is damaged, with the others beside it that look whole; when
                all that the run has was found damaged, now or by an earlier attempt.
        """
        self.wait()
        self._at_step = None  # the state is another one from here on
        wanted = Wanted(tensors, tuple(optional), threads_for(self._ranks))
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

    def _step_of_own(self, folder: Path | None) -> int:
        """The step of one of this run's checkpoints, -1 for none and for another run's."""
        step = step_of_any(folder) if folder is not None else None
        if folder is None or step is None or folder.parent.resolve() != self._directory.resolve():
            return -1
        return step

    def _retain(self) -> None:
        """Retention, on rank 0. The new checkpoint is committed, so trouble here is told and not raised."""
        try:
            gone = retain(self._directory, self._retention, self._attempt, self._in_use)
        except Exception as error:  # noqa: BLE001 - and no other rank would hear of it
            say_beside(f"older checkpoints in {self._directory} could not be removed: {error}")
            return
        for folder in gone[:-1]:
            discard_later(folder)
        if gone:  # its files are written over by the next save, which takes new ones half the time
            self._spare = gone[-1]
            discard_at_end(gone[-1])

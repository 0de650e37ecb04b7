"""Decide when a run saves and which checkpoint is the best; record each save in `metrics/checkpoints.jsonl`."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from toolkit.checkpoint.advice import warning_line
from toolkit.checkpoint.checkpointer import Checkpointer
from toolkit.comm.agreement import RanksLostError, from_rank_zero
from toolkit.config.entry import TRAINING_LOSS
from toolkit.config.table import nearest
from toolkit.errors import ToolkitError
from toolkit.terminal.talk import say_beside
from toolkit.train.state.save_notes import SaveNotes
from toolkit.train.state.training_state import TrainingState
from toolkit.world.facts import World
from toolkit.world.health import HealthWatch
from toolkit.world.stop import SAVE

# Returns a metric of the current state, such as a validation loss. All ranks call it at the same step; rank 0's counts.
Measure = Callable[[], float]


class SaveSettings(Protocol):
    """The keys of `[checkpoint]` that saves use."""

    every_steps: int
    every_s: int
    best: str
    best_mode: Literal["min", "max"]
    best_every_steps: int
    keep_best: int
    on_failing_health: bool
    background: bool
    when_busy: Literal["wait", "skip"]
    on_error: Literal["end", "continue"]


class Saves:
    """Performs the saves of a run, on all ranks.

    Create it after the state is resumed: the timer of `every_s` starts here, and the best metric comes from the state.

    Args:
        measures: metrics that `settings.best` may name, in addition to the training loss.
        saved: called for each checkpoint on all ranks with its folder, or None while it is being written.

    Raises:
        ToolkitError: `settings.best` names an unknown metric, or none although `keep_best` needs it.
    """

    def __init__(
        self,
        world: World,
        state: TrainingState,
        checkpointer: Checkpointer,
        settings: SaveSettings,
        measures: Mapping[str, Measure] | None = None,
        saved: Callable[[Path | None], None] = lambda folder: None,
    ) -> None:
        self._world, self._state, self._checkpointer, self._settings = world, state, checkpointer, settings
        self._best = _BestMetric(world, state, settings, measures or {})
        self._health = _health_watch(world) if settings.on_failing_health else None
        self._notes = SaveNotes(world)
        self._saved = saved
        self._own_reason = ""
        self._ended_at = time.monotonic()

    def asked(self) -> int:
        """Return this rank's stop or save request at the start of a step: `World.stop_asked`, plus saves due here."""
        if self._health is not None and (failing := self._health.look()):
            say_beside(f"rank {self._world.rank} on {self._world.host} requests a save: {failing}")
            self._world.stop_watch.ask_save("health")
        asked = self._world.stop_asked(self._state.step)
        self._own_reason = self._world.stop_watch.save_asked
        if self._world.rank == 0 and 0 < self._settings.every_s <= time.monotonic() - self._ended_at:
            self._own_reason = self._own_reason or "every_s"
            return max(asked, SAVE)
        # Ranks notice a failed save at different times. This request makes all of them check at the end of the step.
        return max(asked, SAVE) if self._checkpointer.save_failed else asked

    def after_step(self, loss: Tensor, *, stop: bool, last: bool) -> bool:
        """Save on all ranks if required; return True if saving, or measuring the metric, took time.

        Args:
            loss: the loss of the step, the same on all ranks.
            stop: True if all ranks must save and return.
            last: True if the run ends with this step.

        Raises:
            ToolkitError: this save or one in the background failed, and `on_error` or the end does not allow the run to
                continue.
        """
        looked = self._best.after_step(loss, last=last)
        self._notes.write_ended()
        if stop or last:
            self._save_at_end("stop" if stop else "end")
            return True
        if not (self._is_due_by_step() or self._world.should_save()):
            return looked
        self._save_and_go_on()
        return True

    def roll_back(self, next_sample: int) -> bool:
        """Load the run's newest checkpoint and continue from `next_sample`; return False if there is none."""
        try:
            self._settle()
        except ToolkitError as error:
            if isinstance(error, RanksLostError):  # no step is possible without these ranks
                raise
            self._tell(f"the checkpoint in progress failed; loading the previous one: {error}")
        if from_rank_zero(self._world, self._checkpointer.latest) is None:
            return False
        self._state.resume(self._checkpointer, self._world)
        self._state.samples = next_sample
        return True

    def _is_due_by_step(self) -> bool:
        every = self._settings.every_steps
        return self._best.is_new or (every > 0 and self._state.step % every == 0)

    def _why(self) -> str:
        """Return the first reason that applies to save now; all ranks have agreed that there is one."""
        if self._best.is_new:
            return "best"
        if self._world.should_save() and self._own_reason != "every_s":
            return self._own_reason or "health"  # another rank requested it, which only health checks do
        return "every_steps" if self._is_due_by_step() else "every_s"

    def _save_at_end(self, why: str) -> None:
        """Save and wait. An earlier failure of a background save does not matter if this save succeeds."""
        began_at = time.monotonic()
        try:
            self._settle()
        except ToolkitError as error:
            self._tell(str(error))
        self._checkpointer.release_loaded()
        self._save(why, began_at, in_background=False)
        self._notes.close()
        if self._world.rank == 0 and self._world.run_dir is not None:
            self._advise(self._world.run_dir)

    def _save_and_go_on(self) -> None:
        settings, began_at = self._settings, time.monotonic()
        if settings.background and settings.when_busy == "skip" and self._checkpointer.is_any_busy():
            self._ask_again()
            return
        try:
            self._settle()
        except ToolkitError as error:
            self._go_on_after(error)
            if not self._is_due_by_step():  # that failure may be the only reason for this request
                self._ask_again()
                return
        try:
            self._save(self._why(), began_at, in_background=settings.background)
        except ToolkitError as error:
            self._go_on_after(error)
        self._ended_at = time.monotonic()

    def _settle(self) -> None:
        """Wait for the save in the background.

        Raises:
            ToolkitError: the save failed; all ranks raise the same error.
        """
        try:
            self._checkpointer.wait()
        except ToolkitError:
            self._best.could_not_be_saved()
            self._ended_at = time.monotonic()
            raise
        finally:
            self._notes.write_ended()

    def _go_on_after(self, error: ToolkitError) -> None:
        if self._settings.on_error == "end" or isinstance(error, RanksLostError):  # steps need the lost ranks
            raise error
        self._tell(f"the run continues without this checkpoint: {error}")

    def _ask_again(self) -> None:
        """Repeat the request at the next step, because nothing was saved now."""
        if self._own_reason not in ("", "every_s"):
            self._world.stop_watch.ask_save(self._own_reason)

    def _save(self, why: str, began_at: float, *, in_background: bool) -> None:
        state, noted = self._state, self._notes.begin(self._state.step, why, self._best.value, began_at)
        state.metric = self._best.to_save()
        try:
            folder = None
            if in_background:
                state.save_in_background(self._checkpointer, self._world, on_end=noted.ended)
            else:
                folder = state.save(self._checkpointer, self._world)
        except ToolkitError as error:
            noted.ended(error)
            raise
        else:
            self._best.saved()
            if not in_background:
                noted.ended(None)
        finally:
            noted.waited()
            self._notes.write_ended()
        self._saved(folder)

    def _advise(self, run_dir: Path) -> None:
        """Log a better save interval if it would have cost far less time."""
        if line := warning_line(run_dir):
            say_beside(line)

    def _tell(self, text: str) -> None:
        """Log a message on rank 0; all ranks call this."""
        if self._world.rank == 0:
            say_beside(text)


class _BestMetric:
    """The metric of `checkpoint.best`: when to measure it, and whether the value is a new best."""

    def __init__(
        self, world: World, state: TrainingState, settings: SaveSettings, measures: Mapping[str, Measure]
    ) -> None:
        self._world, self._state, self._settings = world, state, settings
        name = settings.best
        if settings.keep_best and not name:
            raise ToolkitError(
                f"keep_best = {settings.keep_best} requires a metric in checkpoint.best, got none",
                where="checkpoint.keep_best",
                fix=f'set checkpoint.best, as in best = "{TRAINING_LOSS}"',
            )
        known = [TRAINING_LOSS, *measures]
        if name and name not in known:
            likely = nearest(name, known) or known
            raise ToolkitError(
                f"this job does not measure {name!r}, only {', '.join(known)}",
                where="checkpoint.best",
                fix=f"set checkpoint.best to {' or '.join(map(repr, likely))}",
            )
        self._measure = measures.get(name, self._mean_loss)
        self._sum: Tensor | None = None
        self._steps = 0
        before = state.metric or {}
        self._best = before.get("best") if before.get("name") == name else None
        self._best_before = self._best
        self.value: float | None = None  # the metric of the current state, if measured

    def after_step(self, loss: Tensor, *, last: bool) -> bool:
        """Measure the metric if required; return True if so."""
        self.value = None
        if not self._settings.best:
            return False
        # Summed on the device, because reading the loss would synchronize with the GPU at every step.
        self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
        self._steps += 1
        if not last and self._state.step % self._settings.best_every_steps:
            return False
        value = float(self._measure())
        self.value = from_rank_zero(self._world, lambda: value)
        self._sum, self._steps = None, 0
        return True

    def _mean_loss(self) -> float:
        assert self._sum is not None
        return float(self._sum) / self._steps

    @property
    def is_new(self) -> bool:
        """True if the value is better than every value that was saved as the best."""
        if self.value is None or math.isnan(self.value):
            return False
        if self._best is None:
            return True
        return self.value < self._best if self._settings.best_mode == "min" else self.value > self._best

    def to_save(self) -> dict[str, str | float] | None:
        """Return the current value, if measured, and the best so far, for a resume."""
        if not self._settings.best:
            return None
        best = self.value if self.is_new else self._best
        kept = {"value": self.value, "best": best}
        return {"name": self._settings.best} | {name: value for name, value in kept.items() if value is not None}

    def saved(self) -> None:
        """Record the value as the best if it is new; its save has succeeded or is in progress."""
        self._best_before = self._best
        if self.is_new:
            self._best = self.value

    def could_not_be_saved(self) -> None:
        """Forget the value of a failed background save, so that an equal one can be saved again."""
        self._best = self._best_before


def _health_watch(world: World) -> HealthWatch:
    gpu = ""
    if world.device.startswith("cuda") and torch.version.cuda is not None:
        gpu = f"GPU-{torch.cuda.get_device_properties(world.device).uuid}"
    return HealthWatch(gpu, memory=world.local_rank == 0)

"""When a run saves, on which metric, and what each save came to: `metrics/checkpoints.jsonl`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from toolkit.checkpoint.advice import warning_line
from toolkit.checkpoint.agreement import from_rank_zero
from toolkit.checkpoint.checkpointer import Checkpointer
from toolkit.config.table import nearest
from toolkit.errors import ToolkitError
from toolkit.metrics.checkpoints import SaveLog, SaveRecord
from toolkit.rundir.files import utc_now
from toolkit.train.state import TrainingState
from toolkit.world.facts import World
from toolkit.world.health import HealthWatch
from toolkit.world.stop import SAVE

# Measures the state as it is, such as a validation loss: called on all ranks at the same step; rank 0's answer counts.
Measure = Callable[[], float]
TRAINING_LOSS = "loss"


class SaveSettings(Protocol):
    """What is read of the job's table `[checkpoint]`."""

    every_steps: int
    every_s: int
    best: str
    best_mode: Literal["min", "max"]
    best_every_steps: int
    keep_best: int
    on_failing_health: bool
    on_error: Literal["end", "continue"]


class Saves:
    """The saves of one run, on all ranks.

    Make it when the state was resumed: the clock of `every_s` starts here, and the best metric so far is the state's.

    Args:
        measures: metrics that `settings.best` may name, beside the training loss.

    Raises:
        ToolkitError: `settings.best` names none of them, or nothing where `keep_best` needs it.
    """

    def __init__(
        self,
        world: World,
        state: TrainingState,
        checkpointer: Checkpointer,
        settings: SaveSettings,
        measures: Mapping[str, Measure] | None = None,
    ) -> None:
        self._world, self._state, self._checkpointer, self._settings = world, state, checkpointer, settings
        self._best = _BestMetric(world, state, settings, measures or {})
        self._health = _health_watch(world) if settings.on_failing_health else None
        self._log: SaveLog | None = None
        if world.rank == 0 and world.run_dir is not None:
            self._log = SaveLog(world.run_dir / "metrics" / "checkpoints.jsonl")
        self._own_reason = ""
        self._ended_at = time.monotonic()

    def asked(self) -> int:
        """What this rank asks for as a step begins: as `World.stop_asked`, and for saves of its own accord."""
        if self._health is not None and (failing := self._health.look()):
            _tell(f"rank {self._world.rank} on {self._world.host} asks for a save: {failing}")
            self._world.stop_watch.ask_save("health")
        asked = self._world.stop_asked(self._state.step)
        self._own_reason = self._world.stop_watch.save_asked
        if self._world.rank == 0 and 0 < self._settings.every_s <= time.monotonic() - self._ended_at:
            self._own_reason = self._own_reason or "every_s"
            return max(asked, SAVE)
        return asked

    def after_step(self, loss: Tensor, *, stop: bool, last: bool) -> bool:
        """Save on all ranks if one is due; true when that, or a look at the metric, took time.

        Args:
            loss: of the step, the same on all ranks.
            stop: all ranks are to save and return.
            last: the run ends with this step.

        Raises:
            ToolkitError: the save failed, and `on_error` or the end does not let the run go on.
        """
        looked = self._best.after_step(loss, last=last)
        why = self._why(stop=stop, last=last)
        if not why:
            return looked
        try:
            self._save(why)
        except ToolkitError as error:
            if stop or last or self._settings.on_error == "end":
                raise
            if self._world.rank == 0:
                _tell(f"the run goes on without this checkpoint: {error}")
        self._ended_at = time.monotonic()
        if (stop or last) and self._log is not None:
            self._log.close()
            self._advise()
        return True

    def _why(self, *, stop: bool, last: bool) -> str:
        """The first of the reasons to save now, "" for none. Whether there is one, all ranks agree on."""
        step, every = self._state.step, self._settings.every_steps
        if stop or last:
            return "stop" if stop else "end"
        if self._best.is_new:
            return "best"
        if self._world.should_save() and self._own_reason != "every_s":
            return self._own_reason or "health"  # another rank asked, which they do for their health alone
        if every > 0 and step % every == 0:
            return "every_steps"
        return "every_s" if self._world.should_save() else ""

    def _save(self, why: str) -> None:
        self._state.metric = self._best.to_save()
        started = time.monotonic()
        try:
            folder = self._state.save(self._checkpointer, self._world)
        except ToolkitError as error:
            self._note(why, time.monotonic() - started, None, str(error))
            raise
        self._best.saved()
        self._note(why, time.monotonic() - started, folder, None)

    def _note(self, why: str, seconds: float, folder: Path | None, error: str | None) -> None:
        if self._log is None:
            return
        self._log.write(
            SaveRecord(
                step=self._state.step,
                why=why,
                waited_s=round(seconds, 4),
                committed_s=round(seconds, 4) if folder is not None else None,
                bytes=_size_of(folder) if folder is not None else None,
                error=error,
                metric=self._best.value,
                time=utc_now(),
                attempt=self._world.attempt,
            )
        )

    def _advise(self) -> None:
        """Say in the run's log when another interval would have lost far less."""
        assert self._world.run_dir is not None
        if line := warning_line(self._world.run_dir):
            _tell(line)


class _BestMetric:
    """The metric of the state: when it is measured, and whether it is a new best."""

    def __init__(
        self, world: World, state: TrainingState, settings: SaveSettings, measures: Mapping[str, Measure]
    ) -> None:
        self._world, self._state, self._settings = world, state, settings
        name = settings.best
        if settings.keep_best and not name:
            raise ToolkitError(
                f"keep_best is {settings.keep_best} and no metric is named",
                where="checkpoint.keep_best",
                fix=f'set checkpoint.best, as in best = "{TRAINING_LOSS}"',
            )
        known = [TRAINING_LOSS, *measures]
        if name and name not in known:
            likely = nearest(name, known) or known
            raise ToolkitError(
                f"this job measures no {name!r}", where="checkpoint.best", fix=f"name one of {', '.join(likely)}"
            )
        self._measure = measures.get(name, self._mean_loss)
        self._sum: Tensor | None = None
        self._steps = 0
        before = state.metric or {}
        self._best = before.get("best") if before.get("name") == name else None
        self.value: float | None = None  # of the state as it is now, where it was measured

    def after_step(self, loss: Tensor, *, last: bool) -> bool:
        """Look at the metric if that is due; true when it was."""
        self.value = None
        if not self._settings.best:
            return False
        # Added up where it is: reading a number of a GPU's would wait for the GPU at every step.
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
        """The value is better than all that were saved as the best."""
        if self.value is None or math.isnan(self.value):
            return False
        if self._best is None:
            return True
        return self.value < self._best if self._settings.best_mode == "min" else self.value > self._best

    def to_save(self) -> dict[str, str | float] | None:
        """What a checkpoint keeps: the value where the state was measured, and the best so far for who resumes."""
        if not self._settings.best:
            return None
        best = self.value if self.is_new else self._best
        kept = {"value": self.value, "best": best}
        return {"name": self._settings.best} | {name: value for name, value in kept.items() if value is not None}

    def saved(self) -> None:
        """A value that is saved is the best from now on; one that could not be may come again."""
        if self.is_new:
            self._best = self.value


def _size_of(folder: Path) -> int | None:
    """Bytes of a checkpoint that was just committed; None where its disk does not tell, which ends no run."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError as error:
        _tell(f"the size of {folder} is not known: {error}")
        return None


def _health_watch(world: World) -> HealthWatch:
    gpu = ""
    if world.device.startswith("cuda") and torch.version.cuda is not None:
        gpu = f"GPU-{torch.cuda.get_device_properties(world.device).uuid}"
    return HealthWatch(gpu, memory=world.local_rank == 0)


def _tell(text: str) -> None:
    with suppress(OSError):  # the rank's log lies on the disk that may be full
        sys.stderr.write(f"toolkit: {text}\n")
        sys.stderr.flush()

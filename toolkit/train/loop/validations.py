"""Run the validations of a run when they are due, log the results, and apply early stopping."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.metrics.validation import ValidationLog, ValidationRecord
from toolkit.parallel.distribute import DistributedModel
from toolkit.rundir.layout import RunDirectory
from toolkit.terminal.talk import say
from toolkit.train.average import WeightAverage
from toolkit.train.data.broken import SkipCount
from toolkit.train.data.travel import each_tensor
from toolkit.train.early_stop import EarlyStop
from toolkit.train.held_out import HeldOut, Validation, loss_of, validate
from toolkit.train.local_sgd import LocalSgd
from toolkit.train.state import TrainingState
from toolkit.world.facts import World


class Validations:
    """Validates after every `every` steps, on all ranks.

    Args:
        average: the averaged weights to validate with; None validates the model's own weights.
        local_sgd: merges the replicas before each validation.
        early_stop: decides by the mean of "loss" whether the run ends.
    """

    def __init__(
        self,
        world: World,
        model: DistributedModel,
        held_out: HeldOut,
        *,
        every: int,
        micro_batch: int,
        average: WeightAverage | None = None,
        early_stop: EarlyStop | None = None,
        local_sgd: LocalSgd | None = None,
        told: Callable[[Validation], None] = lambda found: None,
    ) -> None:
        self._world, self._model, self._held_out = world, model, held_out
        self._every, self._micro_batch = every, micro_batch
        self._average, self._early_stop = average, early_stop
        self._local_sgd, self._told = local_sgd, told
        self._skips = SkipCount(lambda said: say(f"validation: {said}"))
        self._last: tuple[int, Validation] | None = None  # the last validation and its step
        self._log = None
        self._marker: Path | None = None
        if world.rank == 0 and world.run_dir is not None:
            self._log = ValidationLog(world.run_dir / "metrics" / "validation.jsonl")
            self._marker = RunDirectory(world.run_dir).attempt(world.attempt).validating

    def measure(self) -> Validation:
        """Validate now. Collective."""
        module, mesh, average, held_out = self._model.module, self._model.mesh, self._average, self._held_out
        if self._local_sgd is not None:
            self._local_sgd.merge()
        with average.in_place_of(module) if average is not None else nullcontext():
            return validate(
                module,
                held_out.source.count or 0,
                self._take_samples,
                held_out.measure,
                micro_batch=self._micro_batch,
                group=mesh.group("replicate", "shard", "cp"),
                alone=mesh.gradient_size == 1,
                sharing=mesh.sizes["cp"],
                pipeline=self._model.pipeline,
            )

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Mark the attempt as validating, which is not a stall. A full disk must not end the run."""
        marker = self._marker
        with suppress(OSError):
            if marker is not None and marker.parent.exists():
                marker.touch()
        yield
        with suppress(OSError):
            if marker is not None:
                marker.unlink(missing_ok=True)

    def _take_samples(self, samples: range) -> Any:
        source, device = self._held_out.source, self._world.device
        batch = source.take(np.arange(samples.start, samples.stop))
        # The held-out part may share its source with training, which must not count these skips.
        self._skips.add(len(samples), source.drain_skips())
        finished = source.finished(each_tensor(batch, lambda tensor: tensor.to(device)))
        return each_tensor(finished, self._model.own_part) if self._model.mesh.sizes["cp"] > 1 else finished

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    @property
    def is_over(self) -> bool:
        """True if early stopping has ended the run; a resume then performs no step unless it has more patience."""
        return self._early_stop is not None and self._early_stop.is_over

    def after_step(self, state: TrainingState) -> bool:
        """Validate, and write the result; return True if the run must end with this step. Collective."""
        with self._marked():
            found = self.measure()
        self._last = (state.step, found)
        self._told(found)
        stopped = ""
        if self._early_stop is not None:
            loss = loss_of(found, "train.early_stop_patience")
            if self._early_stop.should_stop(loss, state.step):
                stopped = self._early_stop.why
        if self._log is not None:
            self._log.write(self._record(state.step, found, stopped))
        if stopped and self._world.rank == 0:
            sys.stderr.write(f"stopped early at step {state.step}: {stopped}\n")
        return bool(stopped)

    def loss_after(self, step: int) -> float:
        """Return the loss of the model after `step`; validates unless `after_step` already has. Collective."""
        found = self._last[1] if self._last is not None and self._last[0] == step else self.measure()
        return loss_of(found, "checkpoint.best")

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _record(self, step: int, found: Validation, stopped: str) -> ValidationRecord:
        return ValidationRecord(
            step,
            found.samples,
            found.means,
            self._average is not None,
            datetime.now(UTC).isoformat(timespec="milliseconds"),
            self._world.attempt,
            stopped,
        )

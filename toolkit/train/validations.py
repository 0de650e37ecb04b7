"""The validations of one run: when they are made, with which weights, where they are written, and when they end it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from toolkit.errors import ToolkitError
from toolkit.metrics.validation import ValidationLog, ValidationRecord
from toolkit.parallel.distribute import DistributedModel
from toolkit.train.average import WeightAverage
from toolkit.train.data.source import Source
from toolkit.train.data.travel import each_tensor
from toolkit.train.early_stop import EarlyStop
from toolkit.train.state import TrainingState
from toolkit.train.validation import Measure, Validation, validate
from toolkit.world.facts import World

LOSS = "loss"  # what early stopping looks at


@dataclass(frozen=True)
class HeldOut:
    """What is validated with: all samples of a source, and how they are measured (`validation.validate`)."""

    source: Source
    measure: Measure


class Validations:
    """Validates after every `every` steps, on all ranks.

    Args:
        average: its weights are validated where there is one.
        early_stop: is shown the mean of "loss".
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
        told: Callable[[Validation], None] = lambda found: None,
    ) -> None:
        self._world, self._model, self._held_out = world, model, held_out
        self._every, self._micro_batch = every, micro_batch
        self._average, self._early_stop = average, early_stop
        self._told = told
        self._log = None
        if world.rank == 0 and world.run_dir is not None:
            self._log = ValidationLog(world.run_dir / "metrics" / "validation.jsonl")

    def measure(self) -> Validation:
        """Validate now. Collective."""
        module, mesh, average, held_out = self._model.module, self._model.mesh, self._average, self._held_out
        with average.in_place_of(module) if average is not None else nullcontext():
            return validate(
                module,
                held_out.source.count or 0,
                self._take_samples,
                held_out.measure,
                micro_batch=self._micro_batch,
                group=mesh.group("replicate", "shard"),
                alone=mesh.data_size == 1,
            )

    def _take_samples(self, samples: range) -> Any:
        source, device = self._held_out.source, self._world.device
        batch = source.take(np.arange(samples.start, samples.stop))
        return source.finished(each_tensor(batch, lambda tensor: tensor.to(device)))

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    def after_step(self, state: TrainingState) -> bool:
        """Validate, and write it down; true when the run is to end with this step. Collective."""
        found = self.measure()
        self._told(found)
        if self._log is not None:
            self._log.write(self._record(state.step, found))
        if self._early_stop is None:
            return False
        stop = self._early_stop.should_stop(loss_of(found, "train.early_stop_patience"))
        if stop and self._world.rank == 0:
            sys.stderr.write(f"stopped early at step {state.step}: the loss has not improved for some validations\n")
        return stop

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _record(self, step: int, found: Validation) -> ValidationRecord:
        return ValidationRecord(
            step,
            found.samples,
            found.means,
            self._average is not None,
            datetime.now(UTC).isoformat(timespec="milliseconds"),
            self._world.attempt,
        )


def loss_of(found: Validation, where: str) -> float:
    """The mean of "loss", which the key `where` looks at.

    Raises:
        ToolkitError: the validation measures no loss.
    """
    if LOSS not in found.means:
        raise ToolkitError(
            f"{where} looks at {LOSS!r}, and the validation measures {', '.join(found.means)}",
            where=where,
            fix=f"measure {LOSS!r} in the job's validation, or leave {where} out",
        )
    return found.means[LOSS]

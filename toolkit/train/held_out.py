"""Validation data, and one validation: every sample counts once, for any number of ranks and samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.errors import ToolkitError
from toolkit.parallel.pipeline_passes import PipelinePasses
from toolkit.train.data.order import split
from toolkit.train.data.source import Source

__all__ = ["HeldOut", "Validation", "evaluating", "loss_of", "validate"]

# Returns the samples with these indices, in the form that `measure` expects.
TakeSamples = Callable[[range], Any]
# Returns by name one number per sample, as `cross_entropy(..., reduction="none")` does.
Measure = Callable[[nn.Module, Any], Mapping[str, Tensor]]
LOSS = "loss"  # the measurement that early stopping and `checkpoint.best` use
WEIGHT = "weight"  # a measurement of this name weights the samples in the others, such as the number of tokens


@dataclass(frozen=True)
class HeldOut:
    """Validation data: all samples of a source, and their measurement.

    With a pipeline the source returns pairs, as for training, and `measure` calls the model once, with the inputs
    unchanged.
    """

    source: Source
    measure: Measure


@dataclass(frozen=True)
class Validation:
    """The mean of each measurement over `samples` samples; with weights the weighted mean, and `weight`, their sum."""

    means: dict[str, float]
    samples: int
    weight: float


def loss_of(found: Validation, where: str) -> float:
    """Return the mean of "loss", which the key `where` uses.

    Raises:
        ToolkitError: the validation does not measure a loss.
    """
    if LOSS not in found.means:
        raise ToolkitError(
            f"{where} uses {LOSS!r}, but the validation measures {', '.join(found.means)}",
            where=where,
            fix=f"measure {LOSS!r} in the job's validation, or omit {where}",
        )
    return found.means[LOSS]


@dataclass(frozen=True)
class _Pass:
    """The samples of one forward pass, and which of them count."""

    taken: range
    counted: range

    @property
    def places(self) -> slice:
        """The indices among all samples of those that count."""
        begin = self.counted.start - self.taken.start if self.counted else 0
        return slice(begin, begin + len(self.counted))


def validate(
    model: nn.Module,
    samples: int,
    take_samples: TakeSamples,
    measure: Measure,
    *,
    micro_batch: int,
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
    pipeline: PipelinePasses | None = None,
) -> Validation:
    """Measure `samples` samples, split over the ranks of the group; every rank gets the same result.

    Ranks exchange sums and counts, never means. Sums are in float64 of per-sample values, so that the result equals
    that of one process up to those values. All ranks run equally many forward passes, which a sharded model requires: a
    rank without further samples repeats sample 0 and does not count it. The model is in evaluation mode. Collective if
    the process group exists.

    Args:
        group: ranks with different samples: the data-parallel ones. Ranks outside hold other parts of one model.
        alone: this rank measures all samples, as ranks do that hold parts of one model.
        micro_batch: samples per forward pass; 0 is a rank's whole share.
        pipeline: passes samples through the stages; `model` is this rank's stage. Samples are pairs whose first item is
            the input. All passes have one size; padding samples do not count.

    Raises:
        ToolkitError: there are no samples, or a measurement does not return one number per sample.
    """
    if samples < 1:
        raise ToolkitError(
            "no sample to validate with", where="validation", fix="pass at least one, or set train.validate_every = 0"
        )
    rank, ranks = (0, 1) if alone or not dist.is_initialized() else (dist.get_rank(group), dist.get_world_size(group))
    sums: dict[str, Tensor] = {}
    with evaluating(model), torch.no_grad():
        if pipeline is None:
            for one in _passes(samples, micro_batch, rank, ranks):
                _add(sums, measure(model, take_samples(one.taken)), one)
        else:
            together = pipeline.evaluated_together
            passes = _equal_passes(samples, micro_batch, rank, ranks, together)
            for first in range(0, len(passes), together):
                _measure_together(pipeline, passes[first : first + together], take_samples, measure, sums)
    found = _over_ranks(sums, samples, ranks, group) if sums else None
    if pipeline is not None:
        found = pipeline.from_last_stage(found)
    assert found is not None, "without a pipeline every rank measures, with one its last stage"
    return found


def _passes(samples: int, micro_batch: int, rank: int, ranks: int) -> list[_Pass]:
    """Return this rank's forward passes, as many as the rank with the most samples has."""
    own = range(samples * rank // ranks, samples * (rank + 1) // ranks)
    largest = -(-samples // ranks)
    length = micro_batch or largest
    parts = split(own, length)
    parts += [range(0)] * (-(-largest // length) - len(parts))
    return [_Pass(part or range(1), part) for part in parts]


def _equal_passes(samples: int, micro_batch: int, rank: int, ranks: int, together: int) -> list[_Pass]:
    """Return forward passes of equal size; their number is a multiple of `together`."""
    length = min(micro_batch or -(-samples // ranks), samples)
    parts = [one.counted for one in _passes(samples, length, rank, ranks)]
    parts += [range(0)] * (-len(parts) % together)
    begins = [max(0, part.stop - length) for part in parts]
    return [_Pass(range(begin, begin + length), part) for begin, part in zip(begins, parts, strict=True)]


def _measure_together(
    pipeline: PipelinePasses,
    passes: Sequence[_Pass],
    take_samples: TakeSamples,
    measure: Measure,
    sums: dict[str, Tensor],
) -> None:
    """Run some passes through a pipeline; its last stage adds up the measurements."""
    taken = [take_samples(one.taken) for one in passes]
    inputs = [_inputs_of(some) for some in taken]

    def heard(number: int, outputs: Tensor) -> None:
        _add(sums, measure(_Passed(inputs[number], outputs), taken[number]), passes[number])

    pipeline.evaluate(inputs, heard)


class _Passed(nn.Module):
    """Replaces the model when a pipeline has already processed the inputs."""

    def __init__(self, inputs: Tensor, outputs: Tensor) -> None:
        super().__init__()
        self._inputs, self._outputs = inputs, outputs

    def forward(self, *given: Any) -> Tensor:
        if len(given) != 1 or given[0] is not self._inputs:
            raise ToolkitError(
                "the validation calls the model with something other than the first item of its samples",
                where="parallel.pp",
                fix="call model(inputs) with these inputs as they are, or set parallel.pp = 1",
            )
        return self._outputs


def _inputs_of(samples: Any) -> Tensor:
    if isinstance(samples, tuple | list) and samples and isinstance(samples[0], Tensor):
        return samples[0]
    raise ToolkitError(
        f"expected pairs of inputs and targets, which validation of a pipeline requires, got a {type(samples).__name__}",
        where="parallel.pp",
        fix="return a tuple that begins with the inputs from the held-out source, or set parallel.pp = 1",
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside this context, and restore the mode of each module after it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _add(sums: dict[str, Tensor], measured: Mapping[str, Tensor], one: _Pass) -> None:
    """Add the counted measurements of a pass; without any, add zeros so that every rank has the same names."""
    taken = len(one.taken)
    for name, values in measured.items():
        if tuple(values.shape) != (taken,):
            raise ToolkitError(
                f"{name!r} has the shape {list(values.shape)} for {taken} samples",
                where="validation",
                fix='return one number for each sample, as with reduction="none"; a mean over tokens goes with their '
                f"number in {WEIGHT!r}",
            )
    some = next(iter(measured.values()))
    weights = measured.get(WEIGHT, torch.ones_like(some))[one.places].double()
    for name, values in measured.items():
        total = weights if name == WEIGHT else values[one.places].double() * weights
        sums[name] = sums.get(name, 0.0) + total.sum()
    if WEIGHT not in measured:
        sums[WEIGHT] = sums.get(WEIGHT, 0.0) + weights.sum()


def _over_ranks(sums: Mapping[str, Tensor], samples: int, ranks: int, group: dist.ProcessGroup | None) -> Validation:
    """Return the means over the samples of all ranks. Collective."""
    names = sorted(sums)
    values = torch.stack([sums[name] for name in names])
    if ranks > 1:
        dist.all_reduce(values, group=group)
    totals = dict(zip(names, values.tolist(), strict=True))
    weight = totals.pop(WEIGHT)
    return Validation({name: total / weight for name, total in totals.items()} if weight else {}, samples, weight)

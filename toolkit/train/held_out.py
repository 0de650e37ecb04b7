"""What a run is validated with, and one validation: every sample counts once, whatever the number of ranks and of samples."""

from __future__ import annotations

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

# The samples with these indices, as `measure` wants them.
TakeSamples = Callable[[range], Any]
# Of the model and some samples: by name, one number for each sample, as `cross_entropy(..., reduction="none")` gives.
Measure = Callable[[nn.Module, Any], Mapping[str, Tensor]]
LOSS = "loss"  # the measurement that early stopping and `checkpoint.best` use
WEIGHT = "weight"  # a measurement of this name is what each sample counts in the others, such as its tokens


@dataclass(frozen=True)
class HeldOut:
    """What is validated with: all samples of a source, and how they are measured.

    For a pipeline the source gives pairs, as for training, and `measure` calls the model once, with the inputs as they are.
    """

    source: Source
    measure: Measure


@dataclass(frozen=True)
class Validation:
    """The mean of each measurement over `samples` samples; with weights the weighted mean, and `weight` their sum."""

    means: dict[str, float]
    samples: int
    weight: float


def loss_of(found: Validation, where: str) -> float:
    """The mean of "loss", which the key `where` uses.

    Raises:
        ToolkitError: the validation measures no loss.
    """
    if LOSS not in found.means:
        raise ToolkitError(
            f"{where} uses {LOSS!r}, but the validation measures {', '.join(found.means)}",
            where=where,
            fix=f"measure {LOSS!r} in the job's validation, or leave {where} out",
        )
    return found.means[LOSS]


@dataclass(frozen=True)
class _Pass:
    """The samples of one forward pass, and those among them that count."""

    taken: range
    counted: range

    @property
    def places(self) -> slice:
        """Where those that count stand among all."""
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

    Sums and counts are added up, never means. Sums are taken in float64 of the numbers of single samples, so that the
    result is that of one process as far as these numbers are. All ranks make as many forward passes, as a
    sharded model needs: a rank whose samples are over repeats sample 0 and counts nothing. The model is in evaluation mode
    meanwhile. Collective once the process group exists.

    Args:
        group: ranks with different samples: the data parallel ones. Ranks outside it hold other parts of one model.
        alone: this rank takes all samples, as the ranks do that hold the parts of one model among them.
        micro_batch: samples of one forward pass; 0 takes a rank's whole share.
        pipeline: what passes samples through the stages of which `model` has this rank's. Samples are pairs then, whose
            first goes into the model. All passes are of one size: what is missing is filled with samples that count
            nothing.

    Raises:
        ToolkitError: there are no samples; a measurement has not one number for each of its samples.
    """
    if samples < 1:
        raise ToolkitError(
            "there is no sample to validate with",
            where="validation",
            fix="give at least one, or set train.validate_every = 0",
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
    assert found is not None, "every rank without a pipeline measures, and so does the last stage of one"
    return found


def _passes(samples: int, micro_batch: int, rank: int, ranks: int) -> list[_Pass]:
    """This rank's forward passes, as many as the rank with most samples makes."""
    own = range(samples * rank // ranks, samples * (rank + 1) // ranks)
    largest = -(-samples // ranks)
    length = micro_batch or largest
    parts = split(own, length)
    parts += [range(0)] * (-(-largest // length) - len(parts))
    return [_Pass(part or range(1), part) for part in parts]


def _equal_passes(samples: int, micro_batch: int, rank: int, ranks: int, together: int) -> list[_Pass]:
    """The same, each of equally many samples, and a multiple of `together` of them."""
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
    """Make some passes through a pipeline; its last stage adds up what it measures."""
    taken = [take_samples(one.taken) for one in passes]
    inputs = [_inputs_of(some) for some in taken]

    def heard(number: int, outputs: Tensor) -> None:
        _add(sums, measure(_Passed(inputs[number], outputs), taken[number]), passes[number])

    pipeline.evaluate(inputs, heard)


class _Passed(nn.Module):
    """Replaces the model after a pipeline has already passed the inputs through it."""

    def __init__(self, inputs: Tensor, outputs: Tensor) -> None:
        super().__init__()
        self._inputs, self._outputs = inputs, outputs

    def forward(self, *given: Any) -> Tensor:
        if len(given) != 1 or given[0] is not self._inputs:
            raise ToolkitError(
                "the validation calls the model with other than the first of a pair of samples",
                where="parallel.pp",
                fix="call model(inputs) with these inputs as they are, or set parallel.pp = 1",
            )
        return self._outputs


def _inputs_of(samples: Any) -> Tensor:
    if isinstance(samples, tuple | list) and samples and isinstance(samples[0], Tensor):
        return samples[0]
    raise ToolkitError(
        f"a pipeline is validated with pairs of inputs and targets, and these samples are a {type(samples).__name__}",
        where="parallel.pp",
        fix="let the source that is held out give a tuple that begins with the inputs, or set parallel.pp = 1",
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module is in the mode that it was in, frozen ones too."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _add(sums: dict[str, Tensor], measured: Mapping[str, Tensor], one: _Pass) -> None:
    """Add up what counts of a pass; where nothing does that adds zeros, so that every rank has the same names."""
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
    """The means over the samples of all ranks. Collective."""
    names = sorted(sums)
    values = torch.stack([sums[name] for name in names])
    if ranks > 1:
        dist.all_reduce(values, group=group)
    totals = dict(zip(names, values.tolist(), strict=True))
    weight = totals.pop(WEIGHT)
    return Validation({name: total / weight for name, total in totals.items()} if weight else {}, samples, weight)

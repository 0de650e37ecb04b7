"""Validation data, and one validation run: every sample counts once for any number of ranks and samples."""

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
# Returns measurements by name, each with one number per sample, as `cross_entropy(..., reduction="none")` does.
Measure = Callable[[nn.Module, Any], Mapping[str, Tensor]]
LOSS = "loss"  # the measurement that early stopping and `checkpoint.best` use
WEIGHT = "weight"  # a measurement of this name, such as the token count, weights the samples in the means of the others


@dataclass(frozen=True)
class HeldOut:
    """Validation data: a source, all of whose samples are used, and the function that measures them.

    With a pipeline, the source must return (inputs, targets) as for training, and `measure` must call the model exactly
    once, with the unchanged inputs.
    """

    source: Source
    measure: Measure


@dataclass(frozen=True)
class Validation:
    """The (weighted) mean of each measurement over `samples` samples, and `weight`, the sum of the sample weights."""

    means: dict[str, float]
    samples: int
    weight: float


def loss_of(found: Validation, where: str) -> float:
    """Return the mean of "loss"; the argument `where` names the config key that requires it, for the error.

    Raises:
        ToolkitError: the validation function does not return a loss.
    """
    if LOSS not in found.means:
        raise ToolkitError(
            f"{where} requires the measurement {LOSS!r}, but the validation function returns {', '.join(found.means)}",
            where=where,
            fix=f"return {LOSS!r} from the validation function, or omit {where}",
        )
    return found.means[LOSS]


@dataclass(frozen=True)
class _Pass:
    """The samples of one forward pass (`taken`), and those that count in the result (`counted`)."""

    taken: range
    counted: range

    @property
    def places(self) -> slice:
        """The positions of the counted samples in the batch."""
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
    sharing: int = 1,
    pipeline: PipelinePasses | None = None,
) -> Validation:
    """Measure `samples` samples, split over the ranks of the group; every rank gets the same result.

    Ranks exchange sums and counts, not means, and add per-sample values in float64. The result therefore equals that of
    a single process, except for rounding in the model. All ranks run the same number of forward passes, because a
    sharded model requires it; a rank that has no samples left repeats sample 0 without counting it. The model is in
    evaluation mode. Collective if the process group exists.

    Args:
        group: the data-parallel ranks, each with other samples; other ranks have other parts of the same model.
        sharing: the number of successive ranks of the group that have parts of the same samples, whose measurements are
            averaged.
        alone: True if this rank measures all samples, because all ranks together have one copy of the model.
        micro_batch: samples per forward pass; 0 runs all samples of the rank in one pass.
        pipeline: runs samples through the stages; `model` is this rank's stage. Samples are tuples whose first item is
            the input. All passes have the same size; padding samples do not count.

    Raises:
        ToolkitError: there are no samples, or a measurement does not return one number per sample.
    """
    if samples < 1:
        raise ToolkitError(
            "no samples to validate on", where="validation", fix="pass samples, or set train.validate_every = 0"
        )
    rank, ranks = (0, 1) if alone or not dist.is_initialized() else (dist.get_rank(group), dist.get_world_size(group))
    rank, ranks = rank // sharing, ranks // sharing
    sums: dict[str, Tensor] = {}
    with evaluating(model), torch.no_grad():
        if pipeline is None:
            for one in _passes(samples, micro_batch, rank, ranks):
                _add(sums, measure(model, take_samples(one.taken)), one, sharing)
        else:
            together = pipeline.evaluated_together
            passes = _equal_passes(samples, micro_batch, rank, ranks, together)
            for first in range(0, len(passes), together):
                _measure_together(pipeline, passes[first : first + together], take_samples, measure, sums, sharing)
    found = _over_ranks(sums, samples, ranks * sharing, group) if sums else None
    if pipeline is not None:
        found = pipeline.from_last_stage(found)
    assert found is not None, "without a pipeline every rank measures, with one its last stage"
    return found


def _passes(samples: int, micro_batch: int, rank: int, ranks: int) -> list[_Pass]:
    """Return this rank's forward passes; every rank gets as many as the rank with the most samples."""
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
    sharing: int,
) -> None:
    """Run forward passes through a pipeline; its last stage sums the measurements."""
    taken = [take_samples(one.taken) for one in passes]
    inputs = [_inputs_of(some) for some in taken]

    def heard(number: int, outputs: Tensor) -> None:
        _add(sums, measure(_Passed(inputs[number], outputs), taken[number]), passes[number], sharing)

    pipeline.evaluate(inputs, heard)


class _Passed(nn.Module):
    """Passed to `measure` in place of the model: returns the outputs that the pipeline has already computed."""

    def __init__(self, inputs: Tensor, outputs: Tensor) -> None:
        super().__init__()
        self._inputs, self._outputs = inputs, outputs

    def forward(self, *given: Any) -> Tensor:
        if len(given) != 1 or given[0] is not self._inputs:
            raise ToolkitError(
                "expected the validation function to call the model with the first item of its samples",
                where="parallel.pp",
                fix="call model(inputs) with the unchanged inputs, or set parallel.pp = 1",
            )
        return self._outputs


def _inputs_of(samples: Any) -> Tensor:
    if isinstance(samples, tuple | list) and samples and isinstance(samples[0], Tensor):
        return samples[0]
    raise ToolkitError(
        f"expected (inputs, targets), which validation with a pipeline requires, got a {type(samples).__name__}",
        where="parallel.pp",
        fix="let the held-out source return a tuple whose first item is the inputs, or set parallel.pp = 1",
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode within this context, and restore the mode of each module on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _add(sums: dict[str, Tensor], measured: Mapping[str, Tensor], one: _Pass, sharing: int) -> None:
    """Add the counted measurements of a pass; if there are none, add zeros so that every rank has the same names."""
    taken = len(one.taken)
    for name, values in measured.items():
        if tuple(values.shape) != (taken,):
            raise ToolkitError(
                f"expected {taken} values of {name!r}, one per sample, got shape {list(values.shape)}",
                where="validation",
                fix='return one number per sample, as with reduction="none"; if these are means over tokens, return '
                f"the number of tokens as {WEIGHT!r}",
            )
    some = next(iter(measured.values()))
    weights = measured.get(WEIGHT, torch.full_like(some, 1 / sharing))[one.places].double()
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

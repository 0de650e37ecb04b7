"""Validation that counts every sample once, whatever the number of ranks and of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.errors import ToolkitError
from toolkit.train.order import split

# The samples with these indices, as `measure` wants them.
TakeSamples = Callable[[range], Any]
# Of the model and some samples: by name, one number for each sample, as `cross_entropy(..., reduction="none")` gives.
Measure = Callable[[nn.Module, Any], Mapping[str, Tensor]]
WEIGHT = "weight"  # a measurement of this name is what each sample counts in the others, such as its tokens


@dataclass(frozen=True)
class Validation:
    """The mean of each measurement over `samples` samples; with weights the weighted mean, and `weight` their sum."""

    means: dict[str, float]
    samples: int
    weight: float


def validate(
    model: nn.Module,
    samples: int,
    take_samples: TakeSamples,
    measure: Measure,
    *,
    micro_batch: int,
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
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
    parts, passes = _parts(samples, micro_batch, rank, ranks)
    sums: dict[str, Tensor] = {}
    with evaluating(model), torch.no_grad():
        for number in range(passes):
            part = parts[number] if number < len(parts) else range(0)
            measured = measure(model, take_samples(part or range(1)))
            _add(sums, measured, part)
    names = sorted(sums)
    values = torch.stack([sums[name] for name in names])
    if ranks > 1:
        dist.all_reduce(values, group=group)
    return _means(dict(zip(names, values.tolist(), strict=True)), samples)


def _parts(samples: int, micro_batch: int, rank: int, ranks: int) -> tuple[list[range], int]:
    """This rank's samples, some for each forward pass, and how many passes the rank with most samples makes."""
    own = range(samples * rank // ranks, samples * (rank + 1) // ranks)
    largest = -(-samples // ranks)
    length = micro_batch or largest
    return split(own, length), -(-largest // length)


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


def _add(sums: dict[str, Tensor], measured: Mapping[str, Tensor], part: range) -> None:
    """Add up some samples; an empty part adds zeros, so that every rank has the same names."""
    count = len(part)
    expected = (count or 1,)
    for name, values in measured.items():
        if tuple(values.shape) != expected:
            raise ToolkitError(
                f"{name!r} has the shape {list(values.shape)} for {expected[0]} samples",
                where="validation",
                fix='return one number for each sample, as with reduction="none"; a mean over tokens goes with their '
                f"number in {WEIGHT!r}",
            )
    some = next(iter(measured.values()))
    weights = measured.get(WEIGHT, torch.ones_like(some)).double()
    for name, values in measured.items():
        total = weights if name == WEIGHT else values.double() * weights
        sums[name] = sums.get(name, 0.0) + (total.sum() if count else torch.zeros_like(total.sum()))
    if WEIGHT not in measured:
        sums[WEIGHT] = sums.get(WEIGHT, 0.0) + torch.zeros_like(weights.sum()) + count


def _means(totals: dict[str, float], samples: int) -> Validation:
    weight = totals.pop(WEIGHT)
    return Validation({name: total / weight for name, total in totals.items()} if weight else {}, samples, weight)

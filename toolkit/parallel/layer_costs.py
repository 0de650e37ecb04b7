"""The costs of the parts of a model, for balancing pipeline stages: measured times, or numbers of parameters."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from toolkit.errors import ToolkitError
from toolkit.parallel.balance import Costs
from toolkit.parallel.materialise import materialise
from toolkit.parallel.outline import Outline
from toolkit.parallel.stages import cut_stage
from toolkit.rundir.files import read_json, write_json
from toolkit.rundir.layout import RunDirectory

__all__ = ["Trial"]

# Number of timed passes. The fastest one counts, because other load only adds time. Short passes are repeated until
# they take _ENOUGH_S in total.
_PASSES, _MOST_PASSES, _ENOUGH_S = 5, 50, 0.05
_NOISE = 0.25  # relative difference below which the times of equal blocks are treated as equal


@dataclass(frozen=True)
class Trial:
    """The arguments of a trial pass: the inputs of one micro-batch, and the autocast context of its forward pass."""

    inputs: Tensor
    precision: torch.autocast


def even_costs(model: nn.Module, outline: Outline) -> Costs:
    """Return a cost of 1 for every block and 0 for the other parts."""
    return Costs(0.0, (1.0,) * len(outline.blocks_of(model)), 0.0)


def parameter_counts(model: nn.Module, outline: Outline) -> Costs:
    """Return the number of parameters of each part; a tied parameter counts in each part that uses it."""
    before = sum(_count(model.get_submodule(name)) for name in outline.before)
    after = sum(_count(model.get_submodule(name)) for name in outline.after)
    return Costs(before, tuple(float(_count(block)) for block in outline.blocks_of(model)), after)


def kept_or_measured_seconds(
    build: Callable[[], nn.Module], outline: Outline, trial: Trial, device: str, run: RunDirectory | None
) -> tuple[Costs, str]:
    """Return `measured_seconds` and their origin; measures once per run and stores the times in the run directory.

    A new measurement could move layers to other stages, which have other random streams. Later attempts would then
    differ from an uninterrupted run.
    """
    counts = parameter_counts(build(), outline)
    kept = _read(run.layer_times, counts) if run and run.layer_times.exists() else None
    if kept is not None:
        return kept, "measured by an earlier attempt"
    costs = measured_seconds(build, outline, trial, device)
    if run:
        write_json(run.layer_times, {"seconds": asdict(costs), "parameters": asdict(counts)})
    return costs, "measured on rank 0"


def _read(path: Path, counts: Costs) -> Costs | None:
    """Return the stored times; None if they are damaged or belong to another model."""
    try:
        found = read_json(path)
        if found["parameters"] != {**asdict(counts), "blocks": list(counts.blocks)}:
            return None
        seconds = found["seconds"]
        return Costs(float(seconds["before"]), tuple(map(float, seconds["blocks"])), float(seconds["after"]))
    except (ToolkitError, OSError, ValueError, KeyError, TypeError):
        return None


def measured_seconds(build: Callable[[], nn.Module], outline: Outline, trial: Trial, device: str) -> Costs:
    """Return the seconds of one forward and backward pass of each part, with one part in memory at a time.

    Args:
        build: creates the model on the meta device.

    Raises:
        ToolkitError: a part of the model cannot run alone.
    """
    count = len(outline.blocks_of(build()))
    nothing = range(0)
    # Each part is a stage: the modules before the blocks, each block, the modules after them.
    cuts = [(nothing, nothing, nothing)] + [(nothing, range(block, block + 1), nothing) for block in range(count)]
    stages = [0] + [1] * count
    stream, seconds, shapes = trial.inputs, [], []
    for stage, cut in [*zip(stages, cuts, strict=True), (2, cuts[0])]:
        part = cut_stage(build, outline, cut, stage)
        shapes.append(tuple(tuple(parameter.shape) for parameter in part.parameters()))
        materialise(part, _any_values, 0, device)
        said = "the modules before the blocks" if stage == 0 else "the modules after them" if stage == 2 else cut[1]
        stream, best = _timed(part, stream, trial.precision, str(said))
        seconds.append(best)
    return Costs(seconds[0], _without_noise(seconds[1:-1], shapes[1:-1]), seconds[-1])


def _timed(part: nn.Module, inputs: Tensor, precision: torch.autocast, said: str) -> tuple[Tensor, float]:
    """Return the outputs of `part`, and the seconds of its fastest pass."""
    times: list[float] = []
    while len(times) <= _PASSES or (sum(times[1:]) < _ENOUGH_S and len(times) <= _MOST_PASSES):
        begun = _now(inputs)
        given = inputs.detach().requires_grad_(inputs.is_floating_point())
        try:
            with precision:
                outputs = part(given)
            if outputs.requires_grad:
                outputs.backward(torch.ones_like(outputs))
        except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise ToolkitError(
                f"{type(part).__name__} cannot run with only {said}, as a pipeline stage must: {error}",
                where="outline",
                fix="let `forward` skip modules that are None and blocks that are missing",
            ) from error
        times.append(_now(inputs) - begun)
    return outputs.detach(), min(times[1:])  # the first pass is a warm-up


def _now(like: Tensor) -> float:
    if like.device.type == "cuda":
        torch.cuda.synchronize(like.device)
    return time.perf_counter()


def _any_values(name: str, tensor: Tensor) -> None:
    """Set values that keep activations from growing or vanishing; they do not affect the time."""
    if tensor.is_floating_point():
        nn.init.normal_(tensor, std=0.02)
    else:
        nn.init.zeros_(tensor)


def _without_noise(seconds: Sequence[float], shapes: Sequence[object]) -> tuple[float, ...]:
    """Replace each time by the median of the blocks with the same shapes, unless it differs by more than noise."""
    alike: dict[object, list[float]] = defaultdict(list)
    for took, shape in zip(seconds, shapes, strict=True):
        alike[shape].append(took)
    usual = {shape: median(times) for shape, times in alike.items()}
    return tuple(
        usual[shape] if abs(took - usual[shape]) <= _NOISE * usual[shape] else took
        for took, shape in zip(seconds, shapes, strict=True)
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

"""Split the blocks of a model into pipeline stages, and create the stages of this rank.

Y. Huang et al., "GPipe", NeurIPS 2019, arXiv:1811.06965; D. Narayanan et al., "PipeDream", SOSP 2019, arXiv:1806.03377.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from toolkit.comm.agreement import from_rank_zero
from toolkit.config.train import ParallelTable
from toolkit.errors import ToolkitError
from toolkit.parallel.balance import Costs, cut_evenly
from toolkit.parallel.layer_costs import Trial, even_costs, kept_or_measured_seconds, parameter_counts
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.outline import Outline
from toolkit.parallel.pipeline_passes import PipelinePasses, Tie
from toolkit.parallel.stages import SharedWeight, StagesOfRank, cut_stage, shared_weights
from toolkit.rundir.layout import RunDirectory
from toolkit.world.facts import World


@dataclass(frozen=True)
class Pipeline:
    """The stages of this rank, still on torch's meta device, from `lay_pipeline`.

    The caller splits, shards and materializes each of `modules` like a whole model, with the names in `known_as`, and
    then uses `whole` and `passes`.
    """

    modules: dict[int, nn.Module]  # the stages of this rank, by number
    cut: tuple[range, ...]  # the blocks of each stage, on all ranks
    known_as: dict[int, dict[str, str]]  # by stage; maps a parameter name in the stage to that in the whole model
    _shared: list[SharedWeight] = field(repr=False)
    _outline: Outline = field(repr=False)
    _group: dist.ProcessGroup = field(repr=False)

    @property
    def stages(self) -> int:
        """The number of stages on all ranks."""
        return len(self.cut)

    def whole(self) -> StagesOfRank:
        """Return the stages as one module."""
        names = {own: name for of_stage in self.known_as.values() for own, name in of_stage.items()}
        return StagesOfRank(list(self.modules.values()), self._outline, names)

    def passes(self, settings: ParallelTable, factor: float, device: str) -> PipelinePasses:
        """Return the object that runs the pipeline; it sums gradients over data-parallel ranks, divided by `factor`."""
        return PipelinePasses(self.modules, self.stages, self._group, settings, factor, device, self._ties())

    def _ties(self) -> list[Tie]:
        ranks = dist.get_world_size(self._group)
        ties = []
        for shared in self._shared:
            for place, (stage, own_name) in enumerate(zip(shared.stages, shared.own_names, strict=True)):
                if stage in self.modules:
                    parameter = self.modules[stage].get_parameter(own_name)
                    ties.append(Tie(shared.name, parameter, shared.stages[1 - place] % ranks, counts=place == 0))
        return ties


def lay_pipeline(
    build: Callable[[], nn.Module],
    outline: Outline,
    world: World,
    mesh: Mesh,
    settings: ParallelTable,
    trial: Trial | None,
) -> Pipeline:
    """Cut the model that `build` creates on the meta device; rank 0 prints the cut to stderr. Collective.

    Raises:
        ToolkitError: there are more stages than blocks; a parameter is in no stage, or in more than two.
    """
    group = mesh.group("pp")
    assert group is not None and dist.get_rank(group) == mesh.place["pp"]
    model = build()
    stages = settings.pp * settings.stages_per_rank
    cut_evenly(even_costs(model, outline), stages)  # rejects too many stages before any measurement
    costs, source = from_rank_zero(world, lambda: _costs(build, outline, world, settings, trial))
    cut = cut_evenly(costs, stages)
    shared = shared_weights(model, outline, cut)
    _refuse_ties_on_one_rank(shared, settings)
    if world.rank == 0:
        sys.stderr.write(_line(settings, cut, costs, source) + "\n")
    own = range(mesh.place["pp"], stages, settings.pp)
    modules = {stage: cut_stage(build, outline, cut, stage) for stage in own}
    known_as = {
        stage: {
            own_name: weight.name
            for weight in shared
            for its_stage, own_name in zip(weight.stages, weight.own_names, strict=True)
            if its_stage == stage and own_name != weight.name
        }
        for stage in own
    }
    return Pipeline(modules, cut, known_as, shared, outline, group)


def _costs(
    build: Callable[[], nn.Module], outline: Outline, world: World, settings: ParallelTable, trial: Trial | None
) -> tuple[Costs, str]:
    """Return the cost of each part, and its origin."""
    if settings.balance == "even":
        return even_costs(build(), outline), "evenly"
    if settings.balance == "parameters":
        return parameter_counts(build(), outline), "by parameters"
    if trial is None:
        raise ToolkitError(
            "measuring the blocks of the model requires the inputs of a micro-batch, which are missing",
            where="parallel.balance",
            fix='pass trial=Trial(inputs, precision) to `Design`, or set balance = "parameters"',
        )
    run = RunDirectory(world.run_dir) if world.run_dir else None
    costs, how = kept_or_measured_seconds(build, outline, trial, world.device, run)
    return costs, f"by time {how}"


def _refuse_ties_on_one_rank(shared: Sequence[SharedWeight], settings: ParallelTable) -> None:
    for weight in shared:
        one, other = weight.stages
        if one % settings.pp == other % settings.pp:
            raise ToolkitError(
                f"{weight.name} is tied between the stages {one} and {other}, which are on the same rank",
                where="parallel.stages_per_rank",
                fix='untie this parameter, or set stages_per_rank = 1 and schedule = "1f1b"',
            )


def _line(settings: ParallelTable, cut: Sequence[range], costs: Costs, source: str) -> str:
    """Return a line such as "pipeline: 1f1b over 2 ranks; blocks 2 + 2 by parameters, 0.1 + 0.13 million"."""
    numbers = " + ".join(str(len(blocks)) for blocks in cut)
    factor, unit = {"measured": (1e3, " ms"), "parameters": (1e-6, " million"), "even": (1.0, "")}[settings.balance]
    of_stages = " + ".join(f"{cost * factor:.3g}" for cost in costs.of_stages(cut))
    said = f", {of_stages}{unit}" if unit else ""
    each = "" if settings.stages_per_rank == 1 else f", {settings.stages_per_rank} stages each"
    return f"pipeline: {settings.schedule} over {settings.pp} ranks{each}; blocks {numbers} {source}{said}"

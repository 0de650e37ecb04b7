"""Turn a model and a mesh into a distributed model: split, shard or replicate it, then allocate and fill it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from toolkit.comm.sharding import choose_sharding_collectives
from toolkit.config.resolved import ResolvedJob
from toolkit.config.train import ParallelTable
from toolkit.errors import ToolkitError
from toolkit.metrics.phases import Profile
from toolkit.parallel.clipping import clip_gradients
from toolkit.parallel.layer_costs import Trial
from toolkit.parallel.materialise import Initialise, materialise, parameters_on_meta
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.outline import Outline
from toolkit.parallel.passes import Heard, MicroBatch, PartOf, Passes, PassesInTurn
from toolkit.parallel.pipeline import lay_pipeline
from toolkit.parallel.pipeline_passes import PipelinePasses
from toolkit.parallel.replicated import replicate
from toolkit.parallel.sharded import Between, shard
from toolkit.parallel.stages import stream_into
from toolkit.parallel.tensor import split_tensors
from toolkit.parallel.tensor_passes import TensorPasses, settle_gradients
from toolkit.parallel.tensor_plan import Split, tensor_plan
from toolkit.topology.facts import Topology
from toolkit.world.facts import World

__all__ = ["Design", "DistributedModel", "Part", "distribute"]


@dataclass(frozen=True)
class DistributedModel:
    """A model on a mesh, with its training operations.

    `module` has this rank's parameters under their names in the whole model. `counts_loss` is true if this rank's
    losses enter the sum over all ranks: ranks that share samples see the same loss. `parameters` is the size of the
    whole model; `counted_elsewhere` are parameters that another pipeline stage counts in the gradient norm. `pipeline`
    passes samples through all stages if `module` has only this rank's. `profile` has the phases of a step; a module may
    add its own.
    """

    module: nn.Module
    mesh: Mesh
    passes: Passes
    parameters: int
    counted_elsewhere: tuple[nn.Parameter, ...] = ()
    profile: Profile = field(default_factory=Profile)
    pipeline: PipelinePasses | None = None

    @property
    def counts_loss(self) -> bool:
        return self.mesh.place["tp"] == 0 and self.mesh.place["cp"] == 0

    @property
    def stream(self) -> tuple[int, int]:
        """Index and number of the random streams of this rank; tensor-parallel ranks share one."""
        number, count = 0, 1
        for name in ("pp", "replicate", "shard", "cp"):
            number = number * self.mesh.sizes[name] + self.mesh.place[name]
            count *= self.mesh.sizes[name]
        return number, count

    def run(
        self, micro_batches: Sequence[MicroBatch], part_of: PartOf, heard: Heard, precision: torch.autocast
    ) -> None:
        """Compute gradients of the mean loss over all ranks from this rank's micro-batches (`Passes.run`). Collective."""
        self.passes.run(micro_batches, part_of, heard, precision)

    def clip(self, max_norm: float) -> Tensor:
        """Scale gradients to a 2-norm of at most `max_norm`, 0 for any; return the norm before. Collective."""
        return clip_gradients(self.module.parameters(), max_norm, self.mesh.group("pp"), self.counted_elsewhere)


@dataclass(frozen=True)
class Part:
    """A model, or a pipeline stage of it, on the meta device, split for this rank but not yet sharded.

    `inputs` returns its inputs for `Design.trial`, on the meta device. The loss follows if it `is_last`.
    """

    module: nn.Module
    inputs: Callable[[], Tensor]
    is_last: bool


@dataclass(frozen=True)
class Design:
    """The construction of a model.

    Args:
        build: creates the model; all ranks create the same.
        initialise: fills each parameter with its first values; buffers keep those of the constructor.
        outline: the order of its parts.
        prepare: changes the model, or each stage, in place before sharding: recomputes or compiles blocks.
        trial: inputs for timing blocks if `[parallel] balance` needs them, and for `prepare`.
    """

    build: Callable[[], nn.Module]
    initialise: Initialise
    outline: Outline
    prepare: Callable[[Part], object] = lambda part: None
    trial: Trial | None = None

    def on_meta(self) -> nn.Module:
        """Return the whole model with parameters on torch's "meta" device, without memory."""
        with parameters_on_meta(0):
            return self.build()

    def trial_on_meta(self) -> Tensor:
        """Return the inputs of one micro-batch as shapes.

        Raises:
            ToolkitError: there is no trial.
        """
        if self.trial is None:
            raise ToolkitError(
                "a trial of the model needs the inputs of a micro-batch",
                where="distribute",
                fix="pass trial=Trial(inputs, precision) to `Design`",
            )
        return self.trial.inputs.to("meta")


def distribute(
    design: Design, world: World, mesh: Mesh, config: ResolvedJob, topology: Topology, profile: Profile | None = None
) -> DistributedModel:
    """Distribute a model over `mesh` as `[parallel]` requests. Collective.

    The model is built on torch's "meta" device, and rejected there if it does not fit the mesh.

    Args:
        profile: the profile to which the model adds its own phases.

    Raises:
        ToolkitError: the model cannot be distributed over this mesh.
    """
    profile = profile or Profile()
    whole = design.on_meta()
    design.outline.blocks_of(whole)
    _refuse_unbuilt(mesh)
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    parts = _Parts(design, tensor_plan(whole, design.outline, config.parallel, world.size), mesh, config)
    twice: tuple[nn.Parameter, ...] = ()
    passes: Passes
    pipeline: PipelinePasses | None = None
    if mesh.sizes["pp"] > 1:
        model, pipeline = _in_pipeline(parts, world, profile)
        twice = tuple(tie.parameter for tie in pipeline.ties if not tie.counts)
        passes = pipeline
    else:
        model, between = whole, parts.lay(whole, world, design.trial_on_meta)
        if parts.are_copies:
            passes = replicate(model, mesh, world, config, topology, profile)
        else:
            passes = PassesInTurn(model, float(mesh.data_size), between, profile)
            if isinstance(model, FSDPModule) and mesh.sizes["shard"] == world.size:
                choose_sharding_collectives(model, world, config.parallel.reduction, topology)
    if parts.tensor is not None:
        passes = TensorPasses(passes, model, parts.tensor.get_group())
    if world.rank == 0:
        sys.stderr.write(f"model: {describe(mesh, config.parallel)}\n")
    return DistributedModel(model, mesh, passes, parameters, twice, profile, pipeline)


@dataclass(frozen=True)
class _Parts:
    """Turns a model, or a stage of it, into one rank's part."""

    design: Design
    plan: Mapping[str, Split]
    mesh: Mesh
    config: ResolvedJob

    @property
    def tensor(self) -> DeviceMesh | None:
        return self.mesh.among("tp")

    @property
    def are_copies(self) -> bool:
        """True if each rank has a whole model."""
        return all(self.mesh.sizes[name] == 1 for name in ("shard", "tp", "pp"))

    def lay(
        self,
        part: nn.Module,
        world: World,
        inputs: Callable[[], Tensor],
        *,
        is_last: bool = True,
        known_as: Mapping[str, str] | None = None,
    ) -> Between:
        """Turn `part`, on the meta device, into this rank's part, with memory and values."""
        design, settings = self.design, self.config.parallel
        splits: AbstractContextManager[None] = nullcontext()
        if self.tensor is not None:
            split_tensors(part, design.outline, self.plan, self.tensor, settings.sequence)
            splits = loss_parallel()  # a trial may include the loss of split logits
        with splits:
            design.prepare(Part(part, inputs, is_last))
        data = self.mesh.among("replicate", "shard")
        between: Between = nullcontext
        if data is not None and not self.are_copies:
            between = shard(part, design.outline, data, settings)
        materialise(part, design.initialise, self.config.train.seed, world.device, known_as)
        return between

    def inputs_of(self, cut: Sequence[range], stage: int) -> Tensor:
        """Return a stage's inputs of the trial, on the meta device: with a split sequence, this rank's slice."""
        stream = stream_into(self.design.on_meta, self.design.outline, cut, stage, self.design.trial_on_meta())
        if stage and self.tensor is not None and self.config.parallel.sequence:
            return stream.narrow(-2, 0, stream.shape[-2] // self.tensor.size())
        return stream


def _in_pipeline(parts: _Parts, world: World, profile: Profile) -> tuple[nn.Module, PipelinePasses]:
    """Return this rank's stages under the whole model's names, and the passes through all of them."""
    design, mesh, settings = parts.design, parts.mesh, parts.config.parallel
    pipeline = lay_pipeline(design.on_meta, design.outline, world, mesh, settings, design.trial)
    for stage, part in pipeline.modules.items():
        parts.lay(
            part,
            world,
            partial(parts.inputs_of, pipeline.cut, stage),
            is_last=stage == pipeline.stages - 1,
            known_as=pipeline.known_as[stage],
        )
    passes = pipeline.passes(settings, float(mesh.data_size), world.device)
    passes.profile = profile
    model = pipeline.whole()
    if parts.tensor is not None:
        passes.settle = partial(settle_gradients, model, parts.tensor.get_group())
    return model, passes


def _refuse_unbuilt(mesh: Mesh) -> None:
    for name, what in (("cp", "sequences"), ("ep", "experts")):
        if mesh.sizes[name] > 1:
            raise ToolkitError(
                f"{name} = {mesh.sizes[name]}: `distribute` does not split {what}; the mesh has the ranks for it",
                where=f"parallel.{name}",
                fix=f"{name} = 1, or split them in the model, over mesh.group({name!r})",
            )


def describe(mesh: Mesh, settings: ParallelTable) -> str:
    """ "4 copies", "2 copies, each sharded over 4 ranks (zero 3), matrices split over 2, a pipeline of 2 ranks (1f1b)"."""
    copies = mesh.sizes["replicate"]
    said = "1 copy" if copies == 1 else f"{copies} copies"
    if mesh.sizes["shard"] > 1:
        said += f", each sharded over {mesh.sizes['shard']} ranks (zero {settings.zero})"
    if mesh.sizes["tp"] > 1:
        said += f", matrices {'and the sequence ' if settings.sequence else ''}split over {mesh.sizes['tp']}"
    if mesh.sizes["pp"] > 1:
        said += f", a pipeline of {mesh.sizes['pp']} ranks ({settings.schedule})"
    return said

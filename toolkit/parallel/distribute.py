"""Distribute a model over a mesh: split, shard or replicate it, then allocate and initialize it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from toolkit.comm.compression.reducer import GradientCompression
from toolkit.comm.sharding import choose_sharding_collectives
from toolkit.config.resolved import ResolvedJob
from toolkit.config.train import ParallelTable
from toolkit.errors import ToolkitError
from toolkit.metrics.phases import Profile
from toolkit.parallel.clipping import clip_gradients
from toolkit.parallel.compressed import averages_copies, compress_scattered, compressed_copies
from toolkit.parallel.context.attention import check_context, split_context
from toolkit.parallel.context.order import own_tokens
from toolkit.parallel.experts.balancing import Balancing, named_layers
from toolkit.parallel.experts.sharding import check_experts, split_experts
from toolkit.parallel.layer_costs import Trial
from toolkit.parallel.materialise import Initialise, Read, materialise, parameters_on_meta
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.outline import Outline
from toolkit.parallel.passes import Heard, MicroBatch, PartOf, Passes, PassesInTurn
from toolkit.parallel.pipeline import lay_pipeline
from toolkit.parallel.pipeline_passes import PipelinePasses
from toolkit.parallel.replicated import compression_of_one_rank, replicate
from toolkit.parallel.sharded import Between, convert_buffers, shard
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

    `module` has this rank's parameters under their names in the whole model. `counts_loss` is true if this rank's loss
    enters the sum over all ranks; it is false on ranks that repeat another rank's loss. `parameters` is the number
    of parameters of the whole model; `counted_elsewhere` lists those that another pipeline stage includes in the
    gradient norm. `pipeline` runs samples through all stages if `module` has only those of this rank. `profile`
    records the phases of a step; a module may add its own. `experts` balances those of a model that has some.
    `compression` is that of the gradients, if there is one.
    """

    module: nn.Module
    mesh: Mesh
    passes: Passes
    parameters: int
    counted_elsewhere: tuple[nn.Parameter, ...] = ()
    profile: Profile = field(default_factory=Profile)
    pipeline: PipelinePasses | None = None
    experts: Balancing | None = None
    compression: GradientCompression | None = None

    @property
    def counts_loss(self) -> bool:
        return self.mesh.place["tp"] == 0

    def own_part(self, tensor: Tensor) -> Tensor:
        """Return this rank's tokens of a batch of sequences, (batch, tokens, ...); without `cp`, all of them."""
        return own_tokens(tensor, self.mesh.place["cp"], self.mesh.sizes["cp"])

    @property
    def stream(self) -> tuple[int, int]:
        """The index of this rank's random stream and the number of streams; tensor-parallel ranks share one."""
        number, count = 0, 1
        for name in ("pp", "replicate", "shard", "cp"):
            number = number * self.mesh.sizes[name] + self.mesh.place[name]
            count *= self.mesh.sizes[name]
        return number, count

    def run(
        self, micro_batches: Sequence[MicroBatch], part_of: PartOf, heard: Heard, precision: torch.autocast
    ) -> None:
        """Compute the gradients of the mean loss over the micro-batches of all ranks (`Passes.run`). Collective."""
        parts = [(self.own_part(inputs), self.own_part(targets)) for inputs, targets in micro_batches]
        self.passes.run(parts, part_of, heard, precision)

    def clip(self, max_norm: float) -> Tensor:
        """Scale gradients to a 2-norm of at most `max_norm` (0: no limit); return the norm before. Collective."""
        return clip_gradients(self.module.parameters(), max_norm, self.mesh.group("pp"), self.counted_elsewhere)


@dataclass(frozen=True)
class Part:
    """A model or a pipeline stage, on the meta device, split for this tensor-parallel rank but not yet sharded.

    `inputs` returns the inputs of this part for `Design.trial`, on the meta device. `is_last` is True if its outputs
    are those of the model, from which the loss is computed.
    """

    module: nn.Module
    inputs: Callable[[], Tensor]
    is_last: bool


@dataclass(frozen=True)
class Design:
    """How to construct a model.

    Args:
        build: creates the model, the same one on all ranks.
        initialise: sets the initial values of each parameter; buffers keep the values from the constructor.
        outline: the structure of the model: its blocks, and the modules before and after them.
        prepare: changes the model, or each stage, in place before sharding, for recomputation or compilation.
        trial: inputs for timing blocks if `[parallel] balance` requires it, and for `prepare`.
        read: returns a part of an initial value, so that ranks read only their own parts; None for what `initialise` sets.
    """

    build: Callable[[], nn.Module]
    initialise: Initialise
    outline: Outline
    prepare: Callable[[Part], object] = lambda part: None
    trial: Trial | None = None
    read: Read | None = None

    def on_meta(self) -> nn.Module:
        """Return the whole model with its parameters on torch's meta device, where they use no memory."""
        with parameters_on_meta(0):
            return self.build()

    def trial_on_meta(self) -> Tensor:
        """Return the inputs of one micro-batch on the meta device.

        Raises:
            ToolkitError: the design has no trial inputs.
        """
        if self.trial is None:
            raise ToolkitError(
                "a trial pass of the model requires the inputs of a micro-batch, which are missing",
                where="distribute",
                fix="pass trial=Trial(inputs, precision) to `Design`",
            )
        return self.trial.inputs.to("meta")


def distribute(
    design: Design, world: World, mesh: Mesh, config: ResolvedJob, topology: Topology, profile: Profile | None = None
) -> DistributedModel:
    """Distribute a model over `mesh` as `[parallel]` configures. Collective.

    The model is built on torch's meta device, so that an unsuitable one is rejected before it uses memory.

    Args:
        profile: the profile to which the model adds its own phases.

    Raises:
        ToolkitError: the model cannot be distributed over this mesh.
    """
    profile = profile or Profile()
    whole = design.on_meta()
    design.outline.blocks_of(whole)
    check_context(whole, mesh.sizes["cp"])
    check_experts(whole, mesh, config.parallel)
    if design.trial is not None:
        inputs = own_tokens(design.trial.inputs, mesh.place["cp"], mesh.sizes["cp"])
        design = replace(design, trial=replace(design.trial, inputs=inputs))
    parameters, layers = (
        sum(parameter.numel() for parameter in whole.parameters()),
        {name: layer.routing.experts for name, layer in named_layers(whole).items()},
    )
    parts = _Parts(design, tensor_plan(whole, design.outline, config.parallel, world.size), mesh, config)
    twice: tuple[nn.Parameter, ...] = ()
    passes: Passes
    pipeline: PipelinePasses | None = None
    compression: GradientCompression | None = None
    if mesh.sizes["pp"] > 1:
        model, pipeline = _in_pipeline(parts, world, profile)
        twice = tuple(tie.parameter for tie in pipeline.ties if not tie.counts)
        passes = pipeline
    else:
        model, between = whole, parts.lay(whole, world, design.trial_on_meta)
        is_local = config.local_sgd.algorithm != "none"  # replicas that exchange no gradients
        if mesh.are_copies and world.size > 1 and not is_local:  # DDP would copy the gradients of a single rank
            passes = replicate(model, mesh, world, config, topology, profile)
            compression = passes.compression
        else:
            passes = PassesInTurn(model, float(mesh.gradient_size), between, profile)
            if world.size == 1 and not is_local and config.gradient_compression.algorithm != "none":
                compression = compression_of_one_rank(model, config)
            if isinstance(model, FSDPModule) and mesh.sizes["shard"] == world.size:
                choose_sharding_collectives(model, world, config.parallel.reduction, topology)
    if parts.tensor is not None:
        passes = TensorPasses(passes, model, parts.tensor.get_group())
    if averages_copies(mesh, config):
        ties = [tie.parameter for tie in pipeline.ties] if pipeline is not None else []
        passes = averaged = compressed_copies(passes, model, world, mesh, config, profile, ties)
        compression = averaged.compression
    elif config.gradient_compression.algorithm != "none" and not mesh.are_copies:
        compress_scattered(model, world, config)
    if world.rank == 0:
        sys.stderr.write(f"model: {describe(mesh, config.parallel)}\n")
    experts = Balancing(named_layers(model), layers, mesh.sizes["tp"], world.device) if layers else None
    return DistributedModel(model, mesh, passes, parameters, twice, profile, pipeline, experts, compression)


@dataclass(frozen=True)
class _Parts:
    """Turns a model, or a pipeline stage of it, into this rank's part."""

    design: Design
    plan: Mapping[str, Split]
    mesh: Mesh
    config: ResolvedJob

    @property
    def tensor(self) -> DeviceMesh | None:
        return self.mesh.parameter_mesh("tp")

    def lay(
        self,
        part: nn.Module,
        world: World,
        inputs: Callable[[], Tensor],
        *,
        is_last: bool = True,
        known_as: Mapping[str, str] | None = None,
    ) -> Between:
        """Split, prepare and shard `part`, which is on the meta device, then allocate and initialize it."""
        design, settings = self.design, self.config.parallel
        if (context := self.mesh.group("cp")) is not None:
            split_context(part, context, settings.context)
        split_experts(part, self.mesh)
        splits: AbstractContextManager[None] = nullcontext()
        if self.tensor is not None:
            split_tensors(part, design.outline, self.plan, self.tensor, settings.sequence)
            splits = loss_parallel()  # a trial may include the loss of split logits
        with splits:
            design.prepare(Part(part, inputs, is_last))
        averaged = () if averages_copies(self.mesh, self.config) else ("replicate",)
        data = self.mesh.parameter_mesh(*averaged, "shard")
        between: Between = nullcontext
        if data is not None and not self.mesh.are_copies:
            between = shard(part, design.outline, data, settings, self.mesh)
        materialise(part, design.initialise, self.config.train.seed, world.device, known_as, design.read)
        convert_buffers(part, settings)
        return between

    def inputs_of(self, cut: Sequence[range], stage: int) -> Tensor:
        """Return the trial inputs of a stage, on the meta device; if the sequence is split, this rank's slice."""
        stream = stream_into(self.design.on_meta, self.design.outline, cut, stage, self.design.trial_on_meta())
        if stage and self.tensor is not None and self.config.parallel.sequence:
            return stream.narrow(-2, 0, stream.shape[-2] // self.tensor.size())
        return stream


def _in_pipeline(parts: _Parts, world: World, profile: Profile) -> tuple[nn.Module, PipelinePasses]:
    """Return this rank's stages, with the names of the whole model, and the object that runs the pipeline."""
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
    passes = pipeline.passes(settings, float(mesh.gradient_size), world.device)
    passes.profile = profile
    model = pipeline.whole()
    if parts.tensor is not None:
        passes.settle = partial(settle_gradients, model, parts.tensor.get_group())
    return model, passes


def describe(mesh: Mesh, settings: ParallelTable) -> str:
    """Return "4 copies" or "2 copies, each sharded over 4 ranks (zero 3), matrices split over 2, ..."."""
    copies = mesh.sizes["replicate"]
    said = "1 copy" if copies == 1 else f"{copies} copies"
    if mesh.sizes["shard"] > 1:
        said += f", each sharded over {mesh.sizes['shard']} ranks (zero {settings.zero})"
    if mesh.sizes["tp"] > 1:
        said += f", matrices {'and the sequence ' if settings.sequence else ''}split over {mesh.sizes['tp']}"
    if mesh.sizes["cp"] > 1:
        said += f", sequences split over {mesh.sizes['cp']} ({settings.context})"
    if mesh.sizes["ep"] > 1:
        said += f", experts split over {mesh.sizes['ep']}"
    if mesh.sizes["pp"] > 1:
        said += f", a pipeline of {mesh.sizes['pp']} ranks ({settings.schedule})"
    return said

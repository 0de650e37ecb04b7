"""Train a model as the job file configures it. Custom loops can use the parts that docs/python.md lists."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.retention import Retention
from toolkit.comm.agreement import from_rank_zero
from toolkit.config.entry import VALIDATION_LOSS
from toolkit.config.found_micro_batch import with_found_micro_batch
from toolkit.config.gradient_compression import check_gradient_compression
from toolkit.config.layout_checks import check_combinations, check_passes, check_roll_back
from toolkit.config.local_sgd import check_local_sgd
from toolkit.config.resolved import ResolvedJob
from toolkit.config.train import TrainTable
from toolkit.errors import ToolkitError, counted
from toolkit.metrics.training import TrainLog, TrainRecord
from toolkit.metrics.validation import in_words
from toolkit.parallel.context.order import own_tokens
from toolkit.parallel.distribute import Design, DistributedModel, Part, distribute
from toolkit.parallel.layer_costs import Trial
from toolkit.parallel.materialise import Initialise, Read, parameters_on_meta
from toolkit.parallel.mesh import Mesh, make_mesh
from toolkit.parallel.outline import Outline
from toolkit.rundir.layout import RunDirectory
from toolkit.topology.facts import Topology
from toolkit.topology.gather import gather_topology
from toolkit.train.adapters.adapt import Adapters
from toolkit.train.average import WeightAverage
from toolkit.train.callbacks import Callback, Callbacks
from toolkit.train.data import Loader, LoaderSettings
from toolkit.train.data.broken import BrokenShare
from toolkit.train.data.source import Source
from toolkit.train.early_stop import EarlyStop
from toolkit.train.expert_migration import migration_of
from toolkit.train.guard import LossGuard
from toolkit.train.held_out import HeldOut, Validation
from toolkit.train.local_sgd import LocalSgd
from toolkit.train.loop.step import LossOf, OptimizerStep
from toolkit.train.loop.training_loop import training_steps
from toolkit.train.loop.validations import Validations
from toolkit.train.memory.compiling import check_compiler, compile_blocks, use_channels_last
from toolkit.train.memory.offload import Offload
from toolkit.train.memory.out_of_memory import halved_micro_batch, memory_parts, parts_named
from toolkit.train.memory.probe import MemoryProbe
from toolkit.train.memory.recompute import MEASURED, recompute
from toolkit.train.optim.adascale import AdaScale, PartGradients, check_parts
from toolkit.train.optim.optimizers import optimizer_of
from toolkit.train.optim.precision import autocast, computed_in, gradient_scaler, use_deterministic_kernels
from toolkit.train.optim.rate_scaling import schedule_of
from toolkit.train.picture import draw_loss
from toolkit.train.randomness import seed_rank
from toolkit.train.state import TrainingState
from toolkit.train.state.saves import Saves
from toolkit.train.throughput import count_flops, no_peak, throughput
from toolkit.world.facts import World

__all__ = ["Task", "Trainer"]


@dataclass(frozen=True)
class Task:
    """The model, loss and data of a training job.

    Args:
        build: creates the model; toolkit calls it with parameters on the meta device.
        initialise: sets the initial values of one unsharded parameter; buffers keep the values of the constructor.
        outline: the structure of the model: its blocks, and the modules before and after them.
        loss_of: returns the mean loss of a micro-batch from the model's outputs and the targets.
        source: the training samples; a finished batch is (inputs, targets).
        data: JSON values that determine the order of samples, so that a resume can detect a change.
        held_out: validation data; None disables validation.
        read: returns a part of an initial value, as in `Design`.
        weight_of: returns the weight of a micro-batch in the mean loss of a step, as in `OptimizerStep`.
        extra: further values and objects for checkpoints, as in `TrainingState`.
    """

    build: Callable[[], nn.Module]
    initialise: Initialise
    outline: Outline
    loss_of: LossOf
    source: Source
    data: dict[str, Any] = field(default_factory=dict)
    held_out: HeldOut | None = None
    read: Read | None = None
    weight_of: Callable[[Tensor], Any] = len
    extra: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """A run's model, optimizer and state, created from the tables [train], [parallel] and [checkpoint].

    A custom loop can use `model`, `optimizer`, `schedule`, `step` and `state`; `train` is the default loop.
    """

    def __init__(self, world: World, config: ResolvedJob, task: Task, callbacks: Sequence[Callback] = ()) -> None:
        """Distribute the model over the ranks and resume the run. Collective."""
        run = RunDirectory(world.run_dir) if world.run_dir else None
        config = with_found_micro_batch(config, run.micro_batch if run else None)
        train = config.train
        check_combinations(train, config.parallel, world.size)
        check_gradient_compression(config)
        check_local_sgd(config)
        if train.deterministic:
            use_deterministic_kernels()
        self._adapters = None
        if config.adapters.rank:
            self._adapters = Adapters(config, task.build, task.initialise, task.outline)
            own = self._adapters
            task = replace(task, build=own.build, initialise=own.initialise, read=own.read)
        self._world, self._config, self._task = world, config, task
        self._callbacks = Callbacks(callbacks)
        topology = gather_topology(world)
        mesh = make_mesh(world, config, topology)
        if world.halvings:
            train = self._with_smaller_micro_batch(mesh)
        check_passes(train, config.parallel, world.size)
        if train.lr_scaling == "adaptive":
            check_parts(train.batch, train.micro_batch, mesh.data_size)
        self.loader = self._made_loader(mesh)
        # A micro-batch of the real size, so that measured times and memory match those of the steps.
        self._trial = self.loader.take_samples(range(train.micro_batch or max(1, train.batch // mesh.data_size)))
        self._device_name = torch.cuda.get_device_name(world.device) if world.device.startswith("cuda") else ""
        self._computed_in = computed_in(world.device, train.precision)
        self._probe = None
        if train.measure_memory:
            self._probe = MemoryProbe(world, mesh, self._config, task.outline, task.loss_of, self._trial)
        self.model = self._laid_out(mesh, topology)
        self.optimizer = optimizer_of(self.model.module, train, (task.outline.blocks,))
        self._offload = Offload(train, self.model.module, task.outline, world) if train.offloaded else None
        if self._offload:
            self.optimizer = self._offload.optimizer(self.optimizer)
        self.schedule = schedule_of(train)
        self.average = WeightAverage(self.model.module, train.average_decay) if train.average_decay else None
        self._guard = _guard_of(train)
        self._early_stop = _early_stop_of(train)
        scaler = gradient_scaler(world.device, train.precision)
        self._scaler = scaler if scaler.is_enabled() else None
        if self.model.compression is not None and self._scaler is not None:
            self.model.compression.scale = self._scaler.get_scale
        is_local = config.local_sgd.algorithm != "none"
        self.local_sgd = LocalSgd(world, self.model.module, self.optimizer, config) if is_local else None
        self.step = self._made_step()
        self._migration = migration_of(self.model, self.optimizer, self.average, self._config)
        # Data-parallel ranks need different dropout, ranks with parts of the same model need equal dropout. The
        # rehearsal draws random numbers, so seed again before the first step.
        seed_rank(train.seed, 0, self.model.stream[0])
        with parts_named(self._memory_parts):
            self.step.rehearse(self._trial)
        seed_rank(train.seed, 0, self.model.stream[0])
        self._flops_per_sample = self._count_flops()
        self._say(f"{self.model.parameters:,} parameters, {world.size} x {world.device}")
        self.state = self._training_state()
        self.validations = self._made_validations()
        self.saves = self._resumed_saves()
        if self.local_sgd:
            self.local_sgd.begin(is_new=not self.state.step)
        if self._offload:
            self._offload.begin(self.optimizer)

    def train(self) -> None:
        """Train until `train.steps` or a stop request, and save the last step. Collective."""
        world, state = self._world, self.state
        log = None
        if world.rank == 0 and world.run_dir is not None:
            log = TrainLog(world.run_dir / "metrics" / "train.jsonl")
        with ExitStack() as opened:  # an error closes the logs, too: they report lines that never found room
            opened.enter_context(parts_named(self._memory_parts))
            if self.validations:
                opened.callback(self.validations.close)
            if log:
                opened.callback(log.close)
            opened.enter_context(self.loader)
            self._callbacks.on_begin(state)
            for record in self._steps():
                if self._offload:
                    self._offload.record()
                if self._probe:
                    self._probe.after_step(self.model.module, self._memory_parts)
                record = self._with_speed(record)
                if log:
                    log.write(record)
                self._tell(record)
                self._callbacks.on_step(state, record)
            if self.local_sgd:
                self.local_sgd.merge()
            self._callbacks.on_end(state, stopped=bool(world.stop_watch.stop_agreed))
        if self._probe:
            self._probe.write()
        if self._offload:
            self._say(f"offloaded: {self._offload.tier.traffic}")
        if log and not world.stop_watch.stop_agreed:
            self._draw(log)

    def _steps(self) -> Iterator[TrainRecord]:
        world, state, loader, place = self._world, self.state, self.loader, self.model.mesh.place
        if self._early_stop is not None and self._early_stop.is_over:
            more = self._early_stop.waited + 1
            self._say(
                f"early stopping has already ended this run: {self._early_stop.why}; to continue it, set "
                f"train.early_stop_patience = {more} or more"
            )
        counts = place["pp"] == place["cp"] == place["tp"] == 0  # one rank of those that read the same samples
        broken = BrokenShare(world, loader.skips, self._config.data.broken_limit, counts=counts)
        return training_steps(
            world, self._config.train, state, self.step, loader.take_samples, self.saves, self.validations, broken,
            self._migration, self.local_sgd,
        )  # fmt: skip

    def _with_smaller_micro_batch(self, mesh: Mesh) -> TrainTable:
        train, halvings = self._config.train, self._world.halvings
        share = train.batch // mesh.data_size
        size, last = (halved_micro_batch(train, self._config.parallel, share, n) for n in (halvings, halvings - 1))
        if size == last:
            raise ToolkitError(
                f"a rank ran out of memory with a micro-batch of {size}, and no smaller one is possible",
                where="train.micro_batch",
                fix="set train.recompute or train.offload, or shard the model over more ranks",
            )
        self._say(f"micro-batch: {size} after {counted(halvings, 'halving')}, because a rank ran out of memory")
        train = train.model_copy(update={"micro_batch": size})
        self._config = self._config.model_copy(update={"train": train})
        return train

    def _memory_parts(self) -> dict[str, int]:
        return memory_parts(self.model.module, self.optimizer, self._offload.tier if self._offload else None)

    def _made_loader(self, mesh: Mesh) -> Loader:
        train, config = self._config.train, self._config
        return Loader(  # BrokenShare in `_steps` applies the limit of broken samples over all ranks
            self._task.source, batch=train.batch, seed=train.seed, rank=mesh.data_rank, size=mesh.data_size,
            micro_batch=train.micro_batch, settings=LoaderSettings.of(config.data), device=self._world.device, broken_limit=None,
        )  # fmt: skip

    def _laid_out(self, mesh: Mesh, topology: Topology) -> DistributedModel:
        task, train = self._task, self._config.train
        trial = Trial(self._trial[0], autocast(self._world.device, train.precision))
        self._trial_targets = own_tokens(self._trial[1], mesh.place["cp"], mesh.sizes["cp"])
        design = Design(task.build, task.initialise, task.outline, self._prepare_blocks, trial, task.read)
        meter = self._probe.meter if self._probe else None
        model = distribute(design, self._world, mesh, self._config, topology, meter)
        if self._adapters is not None:
            self._adapters.fill(model.module, self._world.device)
            self._say(self._adapters.describe(model.module))
        if train.channels_last:
            use_channels_last(model.module)
        return model

    def _made_step(self) -> OptimizerStep:
        train = self._config.train
        parts = PartGradients(self.model.module) if isinstance(self.schedule, AdaScale) else None
        return OptimizerStep(
            self.model, self.optimizer, self.schedule, self._task.loss_of, autocast(self._world.device, train.precision),
            train.batch, train.clip_norm, self._scaler, self.average, self._guard, parts,
            self._offload.gradients if self._offload else None, self._task.weight_of,
        )  # fmt: skip

    def _count_flops(self) -> float | None:
        """Return the model FLOPs of a sample, forward and backward; None if shapes do not determine them."""
        with parameters_on_meta(0):
            whole = self._task.build()
        try:
            flops = count_flops(whole, self._trial, self._task.loss_of)
        except ToolkitError as error:
            self._say(f"cannot count FLOPs: {error}")
            return None
        if said := no_peak(self._device_name, self._computed_in):
            self._say(said)
        return flops.total / len(self._trial[0])

    def _with_speed(self, record: TrainRecord) -> TrainRecord:
        if self._flops_per_sample is None:
            return record
        speed = throughput(
            flops_per_step=self._flops_per_sample * self._config.train.batch,
            tokens_per_step=record.tokens_per_s * record.seconds,
            seconds=record.seconds,
            ranks=self._world.size,
            device_name=self._device_name,
            dtype=self._computed_in,
        )
        return replace(record, flops_per_s=speed.flops_per_s, mfu=speed.utilization)

    def _prepare_blocks(self, part: Part) -> None:
        """Wrap blocks for recomputation, then compile them; torch requires this order, and both before sharding."""
        if self._adapters is not None:
            self._adapters.take_out(part.module)
        config, below = self._config, (self._task.outline.blocks,)
        train = config.train
        if train.recompute != "none":
            # The stages of a rank share its budget equally.
            budget_gb = train.activation_budget_gb / config.parallel.stages_per_rank
            names = recompute(
                part.module,
                train.model_copy(update={"activation_budget_gb": budget_gb}),
                loss_of=self._task.loss_of if part.is_last else lambda outputs, targets: outputs,
                micro_batch=(part.inputs(), self._trial_targets) if train.recompute in MEASURED else None,
                below=below,
            )
            self._say(f"recomputed in the backward pass: {', '.join(names) or 'no block'}")
        if self._probe:
            self._probe.expect(part)
        if train.compile:
            check_compiler(self._world.device)
            compile_blocks(part.module, below, mode=train.compile_mode)

    def _training_state(self) -> TrainingState:
        train = self._config.train
        own: dict[str, Any] = {"guard": self._guard, "early_stop": self._early_stop, "adapters": self._adapters}
        compression = self.local_sgd.compression if self.local_sgd else self.model.compression
        own["gradient_compression"] = compression
        return TrainingState(
            self.model.module, self.optimizer, self.schedule, train.seed, {"seed": train.seed, **self._task.data},
            scaler=self._scaler, modules={"average": self.average} if self.average is not None else {},
            extra=self._task.extra | {name: one for name, one in own.items() if one is not None},
            stream=self.model.stream, offload=self._offload, without_frozen=self._adapters is not None,
            compression=compression, local_sgd=self.local_sgd,
        )  # fmt: skip

    def _made_validations(self) -> Validations | None:
        train, held_out = self._config.train, self._task.held_out
        if not train.validate_every:
            return None
        if held_out is None:
            raise ToolkitError(
                "validation requires held-out samples, but this job has none",
                where="train.validate_every",
                fix="hold out some samples (args.held_out = 0.05 in the shipped jobs), or set train.validate_every = 0",
            )
        return Validations(
            self._world, self.model, held_out, every=train.validate_every, micro_batch=train.micro_batch,
            average=self.average, early_stop=self._early_stop, local_sgd=self.local_sgd, told=self._validated,
        )  # fmt: skip

    def _resumed_saves(self) -> Saves | None:
        world, train, checkpoint = self._world, self._config.train, self._config.checkpoint
        if train.offload_to and train.offloaded != {"activations"} and checkpoint.background:
            self._say("saves stop the training: a copy of the whole state for the background may not fit into memory")
            checkpoint = checkpoint.model_copy(update={"background": False})
        if world.run_dir is None:
            self._say("no run directory: neither checkpoints nor metrics are written")
            check_roll_back(train, None, has_one=False)
            return None
        checkpointer = Checkpointer(
            world.run_dir / "checkpoints", world, retention=Retention.of(checkpoint), aggregate=checkpoint.aggregate,
            compression=checkpoint.compression,
        )  # fmt: skip
        source = self._config.job_directory / checkpoint.source if checkpoint.source else None
        self._say(
            self.state.resume(checkpointer, world, source=source, take=checkpoint.take, without=checkpoint.without)
        )
        if train.guard == "roll_back":
            check_roll_back(train, checkpoint, has_one=from_rank_zero(world, checkpointer.latest) is not None)
        return Saves(world, self.state, checkpointer, checkpoint, self._measures(), self._saved)

    def _measures(self) -> dict[str, Callable[[], float]]:
        """Return the metrics that `checkpoint.best` may name in addition to the training loss."""
        validations = self.validations
        if validations is None:
            return {}
        return {VALIDATION_LOSS: lambda: validations.loss_after(self.state.step)}

    def _tell(self, record: TrainRecord) -> None:
        if record.step % max(1, record.steps // 10) == 0 or record.step == record.steps:
            share = "" if record.mfu is None else f", {record.mfu:.1%} of the GPU's peak"
            self._say(f"step {record.step} of {record.steps}: loss {record.loss:.4f}{share}")

    def _validated(self, found: Validation) -> None:
        self._say(f"validated at step {self.state.step} with {found.samples:,} samples: {in_words(found.means)}")
        self._callbacks.on_validation(self.state, found)

    def _saved(self, folder: Path | None) -> None:
        self._callbacks.on_save(self.state, folder)

    def _draw(self, log: TrainLog) -> None:
        if not log.path.stat().st_size:
            return  # the run resumed from a checkpoint of its last step
        picture = log.path.parent.parent / "loss.png"
        try:
            draw_loss(log.path, picture)
        except ImportError:
            self._say("cannot plot the loss: matplotlib is not installed; run pip install 'toolkit[plot]'")
        else:
            self._say(f"plotted the loss: {picture}")

    def _say(self, line: str) -> None:
        if self._world.rank == 0:
            sys.stderr.write(line + "\n")


def _guard_of(train: TrainTable) -> LossGuard | None:
    if train.guard == "off":
        return None
    return LossGuard(train.guard, deviations=train.guard_deviations, window=train.guard_window, limit=train.guard_limit)


def _early_stop_of(train: TrainTable) -> EarlyStop | None:
    return EarlyStop(train.early_stop_patience, train.early_stop_min_delta) if train.early_stop_patience else None

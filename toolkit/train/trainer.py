"""Trains a model as the job's tables say. It only joins parts that are usable alone: docs/python.md lists them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.retention import Retention
from toolkit.config.metric import VALIDATION_LOSS
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.metrics.training import TrainLog, TrainRecord
from toolkit.parallel.distribute import Design, distribute
from toolkit.parallel.layer_costs import Trial
from toolkit.parallel.materialise import Initialise, parameters_on_meta
from toolkit.parallel.mesh import make_mesh
from toolkit.parallel.outline import Outline
from toolkit.topology.gather import gather_topology
from toolkit.train.adascale import AdaScale, PartGradients
from toolkit.train.average import WeightAverage
from toolkit.train.callbacks import Callback, Callbacks
from toolkit.train.combinations import check_combinations
from toolkit.train.compiling import compile_blocks, use_channels_last
from toolkit.train.data import Loader, LoaderSettings
from toolkit.train.data.source import Source
from toolkit.train.early_stop import EarlyStop
from toolkit.train.guard import LossGuard
from toolkit.train.loop import training_steps
from toolkit.train.optimizers import optimizer_of
from toolkit.train.picture import draw_loss
from toolkit.train.precision import autocast, computed_in, gradient_scaler, use_deterministic_kernels
from toolkit.train.randomness import seed_rank
from toolkit.train.rate_scaling import schedule_of
from toolkit.train.recompute import recompute
from toolkit.train.saves import Saves
from toolkit.train.state import TrainingState
from toolkit.train.step import LossOf, OptimizerStep
from toolkit.train.throughput import count_flops, throughput
from toolkit.train.validation import Validation
from toolkit.train.validations import HeldOut, Validations, loss_of
from toolkit.world.facts import World


@dataclass(frozen=True)
class Task:
    """What a job trains, and with what.

    Args:
        build: makes the model, whose parameters get no memory yet.
        initialise: fills one parameter, at its whole shape, with its first values; buffers keep the constructor's.
        outline: the order of the model's parts.
        loss_of: the mean loss of a micro-batch from the model's outputs and the targets.
        source: of the samples; a batch of it is finished as a pair, inputs and targets.
        data: what the order of samples depends on (JSON values), so that a resume can see a change.
        held_out: what is validated with; None cannot be validated.
    """

    build: Callable[[], nn.Module]
    initialise: Initialise
    outline: Outline
    loss_of: LossOf
    source: Source
    data: dict[str, Any] = field(default_factory=dict)
    held_out: HeldOut | None = None


class Trainer:
    """A run's model, optimizer and state, made as the tables [train], [parallel] and [checkpoint] say.

    `model`, `optimizer`, `schedule`, `step` and `state` are there for a loop of one's own; `train` is ours.
    """

    def __init__(self, world: World, config: ResolvedJob, task: Task, callbacks: Sequence[Callback] = ()) -> None:
        """Lay out the model and go on where the run was. Collective."""
        train = config.train
        check_combinations(train, config.parallel)
        if train.deterministic:
            use_deterministic_kernels()
        self._world, self._config, self._task = world, config, task
        self._callbacks = Callbacks(callbacks)
        topology = gather_topology(world)
        mesh = make_mesh(world, config, topology)
        self.loader = Loader(
            task.source,
            batch=train.batch,
            seed=train.seed,
            rank=mesh.data_rank,
            size=mesh.data_size,
            micro_batch=train.micro_batch,
            settings=LoaderSettings.of(config.data),
            device=world.device,
            broken_limit=config.data.broken_limit,
        )
        # As large as those to come: what is timed with it, or fits into memory with it, is what steps will see.
        self._trial = self.loader.take_samples(range(train.micro_batch or max(1, train.batch // mesh.data_size)))
        precision = autocast(world.device, train.precision)
        design = Design(
            task.build, task.initialise, task.outline, self._prepare_blocks, Trial(self._trial[0], precision)
        )
        self.model = distribute(design, world, mesh, config, topology)
        module = self.model.module
        if train.channels_last:
            use_channels_last(module)
        self.optimizer = optimizer_of(module, train, (task.outline.blocks,))
        self.schedule = schedule_of(train)
        self.average = WeightAverage(module, train.average_decay) if train.average_decay else None
        self._guard = None
        if train.guard != "off":
            self._guard = LossGuard(
                train.guard, deviations=train.guard_deviations, window=train.guard_window, limit=train.guard_limit
            )
        scaler = gradient_scaler(world.device, train.precision)
        self._scaler = scaler if scaler.is_enabled() else None
        self.step = OptimizerStep(
            self.model, self.optimizer, self.schedule, task.loss_of, precision, train.batch,
            train.clip_norm, self._scaler, self.average, self._guard,
            PartGradients(module) if isinstance(self.schedule, AdaScale) else None,
        )  # fmt: skip
        self.step.rehearse(self._trial)
        seed_rank(train.seed, 0, self.model.stream[0])  # another dropout for every share of the batch
        self._flops_per_sample = self._count_flops()
        self._early_stop = EarlyStop(train.early_stop_patience, train.early_stop_min_delta)
        self._say(f"{self.model.parameters:,} parameters, {world.size} x {world.device}")
        self.state = self._training_state()
        self.validations = self._made_validations()
        self.saves = self._resumed_saves()

    def train(self) -> None:
        """Train until `train.steps`, or until asked to stop; either way the last step is in a checkpoint. Collective."""
        world, train, state = self._world, self._config.train, self.state
        log = None
        if world.rank == 0 and world.run_dir is not None:
            log = TrainLog(world.run_dir / "metrics" / "train.jsonl")
        take_samples = self.loader.take_samples
        with self.loader:
            self._callbacks.on_begin(state)
            for record in training_steps(world, train, state, self.step, take_samples, self.saves, self.validations):
                record = self._with_speed(record)
                if log:
                    log.write(record)
                self._tell(record)
                self._callbacks.on_step(state, record)
            self._callbacks.on_end(state, stopped=bool(world.stop_watch.verdict))
        if self.validations:
            self.validations.close()
        if log:
            log.close()
            if state.step == train.steps:
                self._draw(log)

    def _count_flops(self) -> float | None:
        """Model FLOPs of a sample, forward and backward; None where shapes alone do not tell."""
        with parameters_on_meta(0):
            whole = self._task.build()
        try:
            flops = count_flops(whole, self._trial, self._task.loss_of)
        except ToolkitError as error:
            self._say(f"FLOPs are not counted: {error}")
            return None
        return flops.total / len(self._trial[0])

    def _with_speed(self, record: TrainRecord) -> TrainRecord:
        if self._flops_per_sample is None:
            return record
        train, device = self._config.train, torch.device(self._world.device)
        speed = throughput(
            flops_per_step=self._flops_per_sample * train.batch,
            tokens_per_step=record.tokens_per_s * record.seconds,
            seconds=record.seconds,
            ranks=self._world.size,
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
            dtype=computed_in(self._world.device, train.precision),
        )
        return replace(record, flops_per_s=speed.flops_per_s, mfu=speed.utilization)

    def _prepare_blocks(self, model: nn.Module) -> None:
        """Recompute, then compile, as torch wants them before a model is sharded."""
        train, below = self._config.train, (self._task.outline.blocks,)
        if train.recompute != "none":
            inputs, targets = self._trial
            micro_batch = (inputs.to("meta"), targets.to("meta"))
            names = recompute(model, train, loss_of=self._task.loss_of, micro_batch=micro_batch, below=below)
            self._say(f"recomputed in the backward pass: {', '.join(names) or 'no block'}")
        if train.compile:
            compile_blocks(model, below)

    def _training_state(self) -> TrainingState:
        train = self._config.train
        extra: dict[str, Any] = {}
        if self._guard is not None:
            extra["guard"] = self._guard
        if train.early_stop_patience:
            extra["early_stop"] = self._early_stop
        return TrainingState(
            self.model.module,
            self.optimizer,
            self.schedule,
            train.seed,
            {"seed": train.seed, **self._task.data},
            scaler=self._scaler,
            modules={"average": self.average} if self.average is not None else {},
            extra=extra,
            stream=self.model.stream,
        )

    def _made_validations(self) -> Validations | None:
        train, held_out = self._config.train, self._task.held_out
        if not train.validate_every:
            return None
        if held_out is None:
            raise ToolkitError(
                "this job holds no samples out to validate with",
                where="train.validate_every",
                fix="hold some out (args.held_out = 0.05 in the shipped jobs), or set train.validate_every = 0",
            )
        return Validations(
            self._world,
            self.model,
            held_out,
            every=train.validate_every,
            micro_batch=train.micro_batch,
            average=self.average,
            early_stop=self._early_stop if train.early_stop_patience else None,
            told=self._validated,
        )

    def _resumed_saves(self) -> Saves | None:
        world, checkpoint = self._world, self._config.checkpoint
        if world.run_dir is None:
            self._say("no run directory: neither checkpoints nor metrics are written")
            return None
        checkpointer = Checkpointer(
            world.run_dir / "checkpoints",
            world,
            retention=Retention.of(checkpoint),
            aggregate=checkpoint.aggregate,
            compression=checkpoint.compression,
        )
        source = self._config.job_directory / checkpoint.source if checkpoint.source else None
        self._say(
            self.state.resume(checkpointer, world, source=source, take=checkpoint.take, without=checkpoint.without)
        )
        return Saves(world, self.state, checkpointer, checkpoint, self._measures(), self._saved)

    def _measures(self) -> dict[str, Callable[[], float]]:
        """What `checkpoint.best` may name beside the training loss."""
        validations = self.validations
        if validations is None:
            return {}
        return {VALIDATION_LOSS: lambda: loss_of(validations.measure(), "checkpoint.best")}

    def _tell(self, record: TrainRecord) -> None:
        if record.step % max(1, record.steps // 10) == 0 or record.step == record.steps:
            share = "" if record.mfu is None else f", {record.mfu:.1%} of the GPU's peak"
            self._say(f"step {record.step} of {record.steps}: loss {record.loss:.4f}{share}")

    def _validated(self, found: Validation) -> None:
        means = ", ".join(f"{name} {mean:.4f}" for name, mean in found.means.items())
        self._say(f"validated at step {self.state.step} with {found.samples:,} samples: {means}")
        self._callbacks.on_validation(self.state, found)

    def _saved(self, folder: Path | None) -> None:
        self._callbacks.on_save(self.state, folder)

    def _draw(self, log: TrainLog) -> None:
        picture = log.path.parent.parent / "loss.png"
        try:
            draw_loss(log.path, picture)
        except ImportError:
            self._say("no picture of the loss: matplotlib is missing; pip install 'toolkit[plot]'")
        else:
            self._say(f"the loss is drawn in {picture}")

    def _say(self, line: str) -> None:
        if self._world.rank == 0:
            sys.stderr.write(line + "\n")

"""The training state: everything that determines the next step of a run. Saves write it, and a resume restores it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from toolkit.checkpoint.checkpointer import Checkpointer
from toolkit.checkpoint.loading.one_checkpoint import LoadedCheckpoint
from toolkit.checkpoint.saving.background import OnEnd
from toolkit.comm.agreement import from_rank_zero
from toolkit.comm.compression.reducer import GradientCompression
from toolkit.errors import ToolkitError, counted
from toolkit.train.gather_names import of_all_ranks
from toolkit.train.local_sgd import LocalSgd
from toolkit.train.memory.offload import Offload
from toolkit.train.randomness import Generator, RandomStreams
from toolkit.train.state.matching import (
    Stored,
    check_weights,
    left_over,
    names_of,
    refuse_tied,
    shapes_of,
    without_names,
)
from toolkit.train.state.optimizer_state import (
    GroupSettings,
    forget,
    make_room,
    optimizer_tensors,
    refuse_flat_parameters,
)
from toolkit.train.state.stateful import Stateful, take_extra, take_state, values_of
from toolkit.world.facts import World

# A checkpoint may lack tensors below these keys: the states of new ranks and streams, and of parameters without state.
_OPTIONAL = ("random", "optimizer", "gradient_compression", "local_sgd")


@dataclass
class TrainingState:
    """Model, optimizer, schedule, step, data cursor, random streams, and further objects of the job.

    Names in a checkpoint are those of the bare model, without wrappers (DDP, FSDP2, torch.compile, activation
    checkpoints), so that any layout on any number of ranks can resume.

    Args:
        model, optimizer: `model` may be wrapped or not.
        schedule: the learning-rate schedule; torch's schedulers are accepted.
        seed: the seed from which a rank without a saved random stream derives one.
        data: JSON values that determine the order of samples, so that a resume can detect a change.
        step, samples, epoch: optimizer steps, samples read by all ranks, and epochs, since the start of the run.
        scaler: the gradient scaler.
        streams: the job's own random generators, by name. The global ones of torch, Python and numpy are always saved.
        modules: further modules by name, such as an average of the weights.
        extra: JSON values, and objects with a JSON `state_dict()`, by name; those of rank 0 are saved.
        metric: the quality of this state, as `{"name": "loss", "value": 1.23}`, or None.
        stream: index of this rank's random stream and number of streams (`DistributedModel.stream`); ranks that must
            draw the same numbers have the same index. By default, each rank has its own stream.
        offload: what is outside of the memory of the device.
        compression: the compression of the gradients, whose residuals belong to the state.
        local_sgd: exchanges between replicas; a save averages what differs between them.
        without_frozen: leave parameters that are not trained out of checkpoints; the job sets them before a resume.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Stateful | None
    seed: int
    data: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    samples: int = 0
    epoch: int = 0
    scaler: torch.amp.GradScaler | None = None
    streams: Mapping[str, Generator] = field(default_factory=dict)
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    metric: dict[str, Any] | None = None
    stream: tuple[int, int] | None = None
    offload: Offload | None = None
    without_frozen: bool = False
    compression: GradientCompression | None = None
    local_sgd: LocalSgd | None = None

    def __post_init__(self) -> None:
        refuse_flat_parameters(self.model)
        RandomStreams("cpu", self.streams)  # rejects unsupported generators now, instead of at the first save
        self._settings = GroupSettings(self.optimizer)

    def save(self, checkpointer: Checkpointer, world: World) -> Path:
        """Save on all ranks. Each rank adds its own random streams; `local_sgd` makes the other values equal, which they must be."""
        with self._host_access():
            return checkpointer.save(self.step, *self._to_save(world))

    def save_in_background(
        self,
        checkpointer: Checkpointer,
        world: World,
        *,
        when_busy: Literal["wait", "skip"] = "wait",
        on_end: OnEnd | None = None,
    ) -> bool:
        """Copy the state and save it in the background (`Checkpointer.save_in_background`); return False if skipped."""
        tensors, state = self._to_save(world)
        with self._host_access():
            return checkpointer.save_in_background(self.step, tensors, state, when_busy=when_busy, on_end=on_end)

    def _host_access(self) -> AbstractContextManager[None]:
        return self.offload.tier.host_access() if self.offload is not None else nullcontext()

    def _to_save(self, world: World) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.local_sgd is not None:
            self.local_sgd.merge(with_optimizer=True)
        tensors = self._tensors() | {"random": {self._stream_key(world): self._streams(world).states()}}
        if self.compression is not None:
            tensors["gradient_compression"] = self.compression.kept.saved()
        if self.offload is not None:
            tensors["model"] = {name: self.offload.kept(value) for name, value in tensors["model"].items()}
        state = {
            "step": self.step,
            "cursor": {"samples": self.samples, "epoch": self.epoch, "data": self.data},
            **values_of(self._things()),
            "groups": self._settings.changed(),
            "extra": values_of(self.extra),
        }
        if self.metric is not None:
            state["metric"] = self.metric
        return tensors, state

    def resume(
        self,
        checkpointer: Checkpointer,
        world: World,
        *,
        source: Path | None = None,
        take: Literal["all", "weights"] = "all",
        without: Sequence[str] = (),
    ) -> str:
        """Resume on all ranks from the run's newest checkpoint, or start at step 0.

        With `source`, the run resumes from its own newest intact checkpoint that is newer than `source`, else from
        `source`. A rank without a saved random stream gets a new one, derived from seed, step and rank.

        Args:
            source: a checkpoint folder of this run or another; read only.
            take: "weights" loads only the model's tensors from `source` and starts at step 0.
            without: with "weights", names of tensors or modules that keep the job's values; `source` may lack them.

        Returns:
            One line with the step of the resume and everything that could not be restored.

        Raises:
            CorruptCheckpointError: `source` is damaged.
            OwnFailureError: a damaged checkpoint may have overwritten tensors that the next one lacks; another attempt
                succeeds.
            ToolkitError: the checkpoint is of another model or optimizer; the error lists all differences.
        """
        own = from_rank_zero(world, checkpointer.latest) is not None
        if source is None and not own:
            checkpointer.load({})  # raises if only damaged checkpoints are left
            return "starting at step 0: the run has no checkpoint"
        if source is not None and take == "weights":
            _refuse_own(source, world)
            if not own:
                return self._begin_with_weights(checkpointer, world, source, without)
        before = dict(self.optimizer.state)
        make_room(self.optimizer)
        drawn = self._streams(world).states()
        tensors = self._tensors() | {"random": {self._stream_key(world): drawn}}
        if self.compression is not None:
            tensors["gradient_compression"] = self.compression.kept.room()
        otherwise = source if take == "all" else None
        with self._host_access():
            loaded = checkpointer.load(tensors, newer_than=source, otherwise=otherwise, optional=_OPTIONAL)
        if loaded is None:
            self.optimizer.state.clear()
            self.optimizer.state.update(before)
            if source is None:
                return "starting at step 0: the run has no checkpoint"
            return self._begin_with_weights(checkpointer, world, source, without)
        return "; ".join([_resumed_from(loaded), *self._take_over(tensors, loaded, world)])

    def _tensors(self) -> dict[str, Any]:
        return {
            "model": self._model_tensors(),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
            "modules": {name: get_model_state_dict(module) for name, module in self.modules.items()},
            **({"local_sgd": self.local_sgd.outer} if self.local_sgd is not None else {}),
        }

    def _model_tensors(self) -> dict[str, Any]:
        tensors = get_model_state_dict(self.model)
        if not self.without_frozen:
            return tensors
        # torch's `ignore_frozen_params` keeps the second name of a tied parameter.
        named = self.model.named_parameters(remove_duplicate=False)
        kept = {name for name, parameter in named if parameter.requires_grad} | dict(self.model.named_buffers()).keys()
        return {name: tensor for name, tensor in tensors.items() if name in kept}

    def _things(self) -> dict[str, Stateful]:
        named = {"schedule": self.schedule, "scaler": self.scaler}
        return {name: thing for name, thing in named.items() if thing is not None}

    def _streams(self, world: World) -> RandomStreams:
        return RandomStreams(world.device, self.streams)

    def _take_over(self, tensors: dict[str, Any], loaded: LoadedCheckpoint, world: World) -> list[str]:
        """Restore the loaded state; return a message for everything that could not be restored.

        Raises:
            ToolkitError: the checkpoint has no training state.
        """
        if not {"step", "cursor"} <= loaded.state.keys():  # the checkpoint was imported, or saved by another script
            raise ToolkitError(
                "the checkpoint has no training state to resume from",
                where=str(loaded.path),
                fix='set checkpoint.take = "weights" to load only the weights',
            )
        stored = from_rank_zero(world, lambda: Stored.of(loaded.path))
        named = names_of({key: tensors[key] for key in ("model", "optimizer", "modules")})
        wanted = of_all_ranks(world, dict.fromkeys(named))
        unfilled = left_over(stored, tensors, wanted)
        forget(self.optimizer, [tensors["optimizer"][name] for name in unfilled])
        # The load has filled the optimizer's own tensors. A model may have extra state or convert its tensors.
        set_model_state_dict(self.model, tensors["model"], options=StateDictOptions(strict=not self.without_frozen))
        for name, module in self.modules.items():
            set_model_state_dict(module, tensors["modules"][name])
        saved = loaded.state
        self.step, self.metric = saved["step"], saved.get("metric")
        self.samples, self.epoch = saved["cursor"]["samples"], saved["cursor"].get("epoch", 0)
        changes = [
            self._settings.take_over(saved.get("groups", [{}] * len(self.optimizer.param_groups))),
            *self._take_residuals(tensors, loaded, stored),
            *self._take_outer_steps(loaded, stored),
            *self._take_values(saved),
            *self._go_on_drawing(tensors["random"][self._stream_key(world)], loaded, stored, world),
        ]
        if self.step and unfilled and len(unfilled) == len(tensors["optimizer"]):
            changes.append("the optimizer starts without state, because the checkpoint has no optimizer state")
        others = {name.split(".")[0] for name in stored.below("modules")} - self.modules.keys()
        changes += [f"the module {name} of the checkpoint is ignored" for name in sorted(others)]
        before = saved["cursor"]["data"]
        differing = sorted(key for key in before | self.data if before.get(key) != self.data.get(key))
        if differing:
            changes.append(f"the data has changed ({', '.join(differing)}): samples may repeat")
        return [change for change in changes if change]

    def _take_residuals(self, tensors: dict[str, Any], loaded: LoadedCheckpoint, stored: Stored) -> list[str]:
        if self.compression is None:
            return []
        above, room = "gradient_compression.", tensors["gradient_compression"]
        missing = [name.removeprefix(above) for name in loaded.missing if name.startswith(above)]
        idle = {name.split(".")[0] for name in stored.below("gradient_compression.mean")} - room.get("mean", {}).keys()
        dropped = [f"gradient compression drops {', '.join(sorted(idle))} of the checkpoint"] if idle else []
        ranks = loaded.state.get("extra", {}).get("gradient_compression", {}).get("ranks", loaded.world_size)
        return [self.compression.kept.take(room, missing, ranks), *dropped]

    def _take_outer_steps(self, loaded: LoadedCheckpoint, stored: Stored) -> list[str]:
        if self.local_sgd is None or not self.local_sgd.outer:
            return ["the outer momentum of the checkpoint is ignored"] if stored.below("local_sgd") else []
        missing = [name.removeprefix("local_sgd.") for name in loaded.missing if name.startswith("local_sgd.")]
        return [self.local_sgd.take(missing)]

    def _take_values(self, saved: dict[str, Any]) -> list[str]:
        """Restore schedule, scaler and extras; return a message for everything that could not be restored."""
        changes = []
        if self.schedule is not None and take_state("schedule", self.schedule, saved.get("schedule")):
            changes.append("the schedule starts from its beginning, because the checkpoint has no schedule")
        scale = saved.get("scaler")
        if self.scaler is not None and self.scaler.is_enabled():
            if scale:  # restore only two values; the others are settings, which come from the job
                kept = {name: scale[name] for name in ("scale", "_growth_tracker")}
                self.scaler.load_state_dict(self.scaler.state_dict() | kept)
            else:
                changes.append("the gradient scaler starts from its initial scale, because the checkpoint has no scale")
        elif scale:
            changes.append("the gradient scaler of the checkpoint is ignored")
        extra = saved.get("extra", {})
        begun = [name for name in self.extra if take_extra(self.extra, name, extra)]
        if begun:
            changes.append(f"the checkpoint has no {', '.join(begun)}")
        if idle := sorted(extra.keys() - self.extra.keys()):
            changes.append(f"not restored from the checkpoint: {', '.join(idle)}")
        return changes

    def _go_on_drawing(
        self, drawn: dict[str, Tensor], loaded: LoadedCheckpoint, stored: Stored, world: World
    ) -> list[str]:
        """Restore this rank's streams, and derive those that the checkpoint lacks."""
        number, count = self.stream or (world.rank, world.size)
        saved = len({name.partition(".")[0] for name in stored.below("random")})
        streams = self._streams(world)
        above = f"random.{self._stream_key(world)}."
        new = sorted(name.removeprefix(above) for name in loaded.missing if name.startswith(above))
        streams.set_states({name: state for name, state in drawn.items() if name not in new})
        streams.derive(new, self.seed, self.step, number)
        if count > saved and (number >= saved or not new):
            shared = f"random streams with index {saved} or higher are new"
            return [f"ranks {saved} and higher use new random streams" if count == world.size else shared]
        return [f"all ranks use new random streams ({', '.join(new)}), as the checkpoint lacks them"] if new else []

    def _stream_key(self, world: World) -> str:
        number, _ = self.stream or (world.rank, world.size)
        return f"rank-{number:05d}"

    def _begin_with_weights(
        self, checkpointer: Checkpointer, world: World, source: Path, without: Sequence[str]
    ) -> str:
        model = get_model_state_dict(self.model)
        shapes = of_all_ranks(world, shapes_of(model))

        def check() -> int:
            stored = Stored.of(source)
            check_weights(stored, shapes, without)
            refuse_tied(model, taken)
            return stored.step

        taken = without_names(model, without)
        step = from_rank_zero(world, check)
        checkpointer.load({"model": taken}, source=source)
        set_model_state_dict(self.model, model | taken)
        but = f", without {', '.join(without)}" if without else ""
        return f"starting at step 0 with the weights of {source}, saved at step {step}{but}"


def _refuse_own(source: Path, world: World) -> None:
    """Reject a checkpoint of this run: if it restarted at step 0, its newest checkpoint would be ambiguous."""
    if world.run_dir is not None and source.resolve().is_relative_to(world.run_dir.resolve()):
        raise ToolkitError(
            f"{source.name} is a checkpoint of this run, and a run cannot restart with its own weights",
            where="checkpoint.take",
            fix='submit a new run with this checkpoint as its source, or set checkpoint.take to "all"',
        )


def _resumed_from(loaded: LoadedCheckpoint) -> str:
    return f"resumed at step {loaded.step} from {loaded.path}, saved by {counted(loaded.world_size, 'rank')}"

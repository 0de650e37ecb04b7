"""All that decides the next step of a run: what a checkpoint holds and a resumed run gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from toolkit.checkpoint.checkpointer import Checkpointer, LoadedCheckpoint
from toolkit.train import randomness
from toolkit.train.schedule import Schedule
from toolkit.world.facts import World


@dataclass
class TrainingState:
    """Model, optimizer, schedule, step, data cursor and random streams.

    `step` counts optimizer steps and `samples` the samples read by all ranks, both since the run began.
    `data` names what the order of samples depends on (JSON values), so that a resume can see a change.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    seed: int
    data: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    samples: int = 0

    def save(self, checkpointer: Checkpointer, world: World) -> Path:
        """Save on all ranks. Each adds its own random streams; the rest is the same everywhere."""
        tensors = self._tensors() | {"random": {_stream_key(world.rank): randomness.streams(world.device)}}
        state = {
            "step": self.step,
            "cursor": {"samples": self.samples, "data": self.data},
            "schedule": {"taken": self.schedule.taken},
        }
        return checkpointer.save(self.step, tensors, state)

    def resume(self, checkpointer: Checkpointer, world: World, *, source: Path | None = None) -> str:
        """Go on, on all ranks, from the run's newest checkpoint, else begin.

        With `source` the run goes on from what it saved since, if that is good: it began from there and crashed.
        Else from `source`, and from nothing older. A rank without a saved stream draws from a new one, derived
        from seed, step and rank.

        Returns:
            One line that says where the run goes on and what could not be taken over.

        Raises:
            CorruptCheckpointError: `source` is damaged.
        """
        streams = randomness.streams(world.device)
        tensors = self._tensors() | {"random": {_stream_key(world.rank): streams}}
        loaded = checkpointer.load(tensors, newer_than=source, optional=["random"])
        if loaded is None and source is not None:
            loaded = checkpointer.load(tensors, source=source, optional=["random"])
        if loaded is None:
            self.optimizer.state.clear()  # _tensors() took a step of size 0 to make room for what is loaded
            return "starting at step 0: the run has no checkpoint"
        self._take_over(tensors, loaded.state)
        if loaded.missing:
            randomness.seed_rank(self.seed, self.step, world.rank)
        else:
            randomness.set_streams(streams, world.device)
        return "; ".join([_resumed_from(loaded), *self._changes(loaded, world)])

    def _tensors(self) -> dict[str, Any]:
        # The optimizer's param_groups are left out: they hold settings, which come from the job.
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": get_model_state_dict(self.model), "optimizer": optimizer["state"]}

    def _take_over(self, tensors: dict[str, Any], state: dict[str, Any]) -> None:
        settings = get_optimizer_state_dict(self.model, self.optimizer)["param_groups"]
        set_model_state_dict(self.model, tensors["model"])
        optimizer = {"state": tensors["optimizer"], "param_groups": settings}
        set_optimizer_state_dict(self.model, self.optimizer, optimizer)
        self.step = state["step"]
        self.samples = state["cursor"]["samples"]
        self.schedule.taken = state["schedule"]["taken"]

    def _changes(self, loaded: LoadedCheckpoint, world: World) -> list[str]:
        changes = []
        if loaded.missing:
            changes.append("all ranks draw new random streams, as the device is another")
        elif world.size > loaded.world_size:
            changes.append(f"ranks from {loaded.world_size} on draw new random streams")
        before = loaded.state["cursor"]["data"]
        differing = sorted(key for key in before | self.data if before.get(key) != self.data.get(key))
        if differing:
            changes.append(f"the data is not what it was ({', '.join(differing)}): samples may come again")
        return changes


def _stream_key(rank: int) -> str:
    return f"rank-{rank:05d}"


def _resumed_from(loaded: LoadedCheckpoint) -> str:
    return f"resumed at step {loaded.step} from {loaded.path}, saved by {loaded.world_size} ranks"

"""A model of two blocks that learns to add eight numbers: a training of 12 steps takes less than a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from launch import job, launch
from torch import nn

from toolkit.config.resolved import ResolvedJob
from toolkit.metrics.training import TrainRecord, read_train_log
from toolkit.parallel.outline import Outline
from toolkit.world.facts import World

STEPS, BATCH = 12, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, stream):
        for block in self.blocks:
            stream = stream + torch.tanh(block(stream))
        return self.last(stream)


def initialise(name: str, tensor: torch.Tensor) -> None:
    nn.init.normal_(tensor, std=0.1)


def samples_at(samples: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs, each seeded by the number of its sample, and their sums."""
    inputs = torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(one)) for one in samples])
    return inputs, inputs.sum(1, keepdim=True)


def measure(model: nn.Module, samples: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    inputs, targets = samples
    return {"loss": (model(inputs) - targets).square().flatten()}


class Samples:
    """A data source of `count` samples."""

    most_workers = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def take(self, positions):
        return samples_at(positions.tolist())

    def finished(self, batch):
        return batch

    def drain_skips(self):
        return []


def train(world, config, take_samples=samples_at, callbacks=(), held_out=10, loss_of=nn.functional.mse_loss):
    """Train on the global samples in their order, on one rank of the job; returns the trainer."""
    from toolkit.train.held_out import HeldOut
    from toolkit.train.trainer import Task, Trainer

    task = Task(
        Model, initialise, Outline(blocks="blocks"), loss_of, Samples(1000),
        held_out=HeldOut(Samples(held_out), measure) if held_out else None,
    )  # fmt: skip
    trainer = Trainer(world, config, task, callbacks)
    trainer.loader.take_samples = take_samples
    trainer.train()
    return trainer


def config_of(**settings: Any) -> ResolvedJob:
    """A job of 12 steps with batches of four samples and a constant learning rate."""
    return job(steps=STEPS, batch=BATCH, micro_batch=1, warmup_steps=0, schedule="constant", **settings)


def saved_every(steps: int, config: ResolvedJob) -> ResolvedJob:
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": steps})})


def note(world: World, **findings: Any) -> None:
    """Hand what a rank has found to the test, which reads it with `TinyTraining.findings`."""
    (world.run_dir / f"findings-{world.rank}.json").write_text(json.dumps(findings))


@dataclass(frozen=True)
class TinyTraining:
    """Trainings in one run directory."""

    run_dir: Path

    def launch(self, function: Callable[..., Any], ranks: int, config: ResolvedJob, *given: Any, **more: Any) -> None:
        """Call `function(world, config, *given)` on each rank."""
        launch(function, ranks, self.run_dir, config, *given, **more)

    def findings(self, rank: int) -> dict[str, Any]:
        return json.loads((self.run_dir / f"findings-{rank}.json").read_text())

    def records(self) -> list[TrainRecord]:
        """The metrics of all steps."""
        return list(read_train_log(self.run_dir / "metrics" / "train.jsonl"))

"""A run whose own checkpoints are all damaged does not forget them, nor keep a part of what they held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ckpt_runs import ALONE, SHARD, flip
from torch import nn

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.errors import OwnFailureError
from toolkit.train.state import TrainingState


def state_of(fill: float, width: int = 8) -> TrainingState:
    """Two layers and a module beside them, all of whose weights are one number."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
    beside = nn.Linear(8, 8, bias=False)
    for parameter in [*model.parameters(), *beside.parameters()]:
        nn.init.constant_(parameter, fill)
    return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), None, seed=1, modules={"ema": beside})


def saved(directory: Path, fill: float, step: int, width: int = 8) -> Path:
    state = state_of(fill, width)
    state.step = step
    return state.save(Checkpointer(directory, ALONE), ALONE)


def weights(module: nn.Module) -> list[set[float]]:
    return [set(parameter.flatten().tolist()) for parameter in module.parameters()]


def test_damage_of_all_own_checkpoints_is_told_at_every_attempt(tmp_path):
    for step in (10, 20):
        flip(saved(tmp_path, 1, step) / SHARD, -5)
    for attempt in (1, 2, 3):
        world = replace(ALONE, attempt=attempt)
        with pytest.raises(CorruptCheckpointError, match="all checkpoints are damaged: step-00000010"):
            state_of(1).resume(Checkpointer(tmp_path, world), world)


def test_weights_taken_after_damage_are_the_sources_and_the_rest_is_as_the_job_made_it(tmp_path):
    source = saved(tmp_path / "old", 3, 7)
    flip(saved(tmp_path / "new", 9, 10) / SHARD, -5)
    state = state_of(1)
    said = state.resume(Checkpointer(tmp_path / "new", ALONE), ALONE, source=source, take="weights", without=["1"])
    assert said == f"starting at step 0 with the weights of {source}, saved at step 7, without 1"
    assert weights(state.model) == [{3.0}, {1.0}]
    assert weights(state.modules["ema"]) == [{1.0}]
    assert state.step == 0 and not state.optimizer.state


def test_weights_too_large_to_be_copied_are_taken_after_damage_by_the_next_attempt(tmp_path):
    source = saved(tmp_path / "old", 3, 7, width=520)
    flip(saved(tmp_path / "new", 9, 10, width=520) / SHARD, -5)
    for attempt in (1, 2):
        state, world = state_of(1, width=520), replace(ALONE, attempt=attempt)
        checkpointer = Checkpointer(tmp_path / "new", world)
        if attempt == 1:
            with pytest.raises(OwnFailureError, match=r"model\.0\.weight.* the damaged checkpoint step-00000010"):
                state.resume(checkpointer, world, source=source, take="weights", without=["1"])
        else:
            state.resume(checkpointer, world, source=source, take="weights", without=["1"])
    assert weights(state.model) == [{3.0}, {1.0}]
    assert weights(state.modules["ema"]) == [{1.0}]

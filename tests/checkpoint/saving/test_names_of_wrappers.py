"""A wrapped model is saved under the names of the model alone, and any wrapping loads what any other saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layouts import Layout, Model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import ToolkitError
from toolkit.train.state import TrainingState
from toolkit.world.facts import World

ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")
TEXT = torch.arange(18).reshape(2, 9)


def checkpointed(model: nn.Module) -> nn.Module:
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    return model


def compiled_inside(model: nn.Module) -> nn.Module:
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def fsdp(model: nn.Module) -> nn.Module:
    return Layout("fsdp").place(model)


WRAPPINGS = {
    "ddp": [DistributedDataParallel],
    "compiled": [compiled],
    "a block compiled": [compiled_inside],
    "activation checkpoint": [checkpointed],
    "fsdp": [fsdp],
    "all": [checkpointed, compiled_inside, compiled, DistributedDataParallel],
    "all over ddp": [checkpointed, DistributedDataParallel, compiled],
    "fsdp and all": [checkpointed, compiled_inside, fsdp, compiled],
}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state_of(wrapping: list, seed: int) -> TrainingState:
    torch.manual_seed(seed)
    model: nn.Module = Model()
    for wrap in wrapping:
        model = wrap(model)
    return TrainingState(model, torch.optim.AdamW(model.parameters()), None, seed=1)


def step(state: TrainingState) -> float:
    loss = state.model(TEXT)
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step += 1
    return loss.item()


@pytest.mark.parametrize("name", WRAPPINGS)
def test_names_are_those_of_the_model_alone(name, group, tmp_path):
    alone, wrapped = state_of([], seed=0), state_of(WRAPPINGS[name], seed=0)
    names = []
    for state, folder in ((alone, tmp_path / "alone"), (wrapped, tmp_path / "wrapped")):
        step(state)
        names.append(set(read_manifest(state.save(Checkpointer(folder, ALONE), ALONE)).tensors))
    assert names[0] == names[1]
    assert {"model.blocks.0.up.weight", "optimizer.blocks.1.down.bias.exp_avg_sq"} < names[0]
    expected = step(alone)
    for wrapping, folder in ((WRAPPINGS[name], "alone"), ([], "wrapped")):
        other = state_of(wrapping, seed=1)
        other.resume(Checkpointer(tmp_path / folder, ALONE), ALONE)
        assert step(other) == expected


def test_tied_weights_are_one_tensor_again(group, tmp_path):
    def tied(wrapping: list) -> TrainingState:
        def tie(model: nn.Module) -> nn.Module:
            model.head.weight = model.embedding.weight
            return model

        return state_of([tie, *wrapping], seed=0)

    state = tied([DistributedDataParallel])
    step(state)
    state.save(Checkpointer(tmp_path / "ck", ALONE), ALONE)
    expected = step(state)
    for wrapping in ([], [DistributedDataParallel], [compiled]):
        other = tied(wrapping)
        other.resume(Checkpointer(tmp_path / "ck", ALONE), ALONE)
        assert step(other) == expected


@pytest.mark.filterwarnings("ignore")
def test_flat_parameters_are_refused(group):
    with pytest.raises(ToolkitError, match=r"shard the model with torch\.distributed\.fsdp\.fully_shard"):
        state_of([lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"))], seed=0)

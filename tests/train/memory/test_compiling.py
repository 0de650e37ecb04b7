"""Compiled blocks and channels-last weights: the same values, the same names, the same checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from toolkit.checkpoint import Checkpointer
from toolkit.errors import ToolkitError
from toolkit.jobs.train_lm import GPT, Arguments, loss_of
from toolkit.train.memory import compiling
from toolkit.train.memory.compiling import check_compiler, compile_blocks, use_channels_last
from toolkit.train.memory.recompute import recompute_block
from toolkit.train.state import TrainingState
from toolkit.world.facts import World

ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")
TEXT = torch.arange(16).view(2, 8)


def gpt() -> GPT:
    torch.manual_seed(5)
    return GPT(Arguments(layers=2, width=16, heads=2, context=8, dropout=0.0))


def state_of(model: nn.Module) -> TrainingState:
    return TrainingState(model, torch.optim.AdamW(model.parameters(), lr=0.01), None, 5)


def step(state: TrainingState) -> float:
    loss = loss_of(state.model(TEXT), TEXT)
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step += 1
    return loss.item()


@pytest.fixture
def graphs() -> list[torch.fx.GraphModule]:
    torch._dynamo.reset()
    return []


def test_blocks_are_compiled_once_for_all_and_a_plain_model_takes_their_checkpoint(graphs, tmp_path):
    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    model, plain = gpt(), gpt()
    assert compile_blocks(model, backend=backend) == ["blocks.0", "blocks.1"]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    state, other = state_of(model), state_of(plain)
    assert [step(state) for _ in range(2)] == [step(other) for _ in range(2)]
    (graph,) = graphs  # one region for both blocks, whose weights are inputs
    products = [node for node in graph.graph.nodes if node.target is torch._C._nn.linear]
    assert len(products) == 4, "those of one block"
    state.save(Checkpointer(tmp_path, ALONE), ALONE)
    third = state_of(gpt())
    third.resume(Checkpointer(tmp_path, ALONE), ALONE)
    assert step(third) == step(state) == step(other)


def test_a_recomputed_block_may_be_compiled(graphs):
    model, plain = gpt(), gpt()
    for block in model.blocks:
        recompute_block(block)
    compile_blocks(model, backend="aot_eager")
    loss_of(model(TEXT), TEXT).backward()
    loss_of(plain(TEXT), TEXT).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad, atol=1e-6)


def convolutions() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def test_channels_last_changes_the_layout_alone(tmp_path):
    plain = convolutions()
    model = use_channels_last(copy.deepcopy(plain))
    assert model[3].weight.is_contiguous(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 8, 8)
    assert torch.allclose(model(images), plain(images), atol=1e-6)
    assert model(images).is_contiguous(memory_format=torch.channels_last)
    state = state_of(model)
    model(images).sum().backward()
    state.optimizer.step()
    state.save(Checkpointer(tmp_path, ALONE), ALONE)
    other = state_of(convolutions())
    other.resume(Checkpointer(tmp_path, ALONE), ALONE)
    for found, expected in zip(other.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_volumes_have_their_channels_last_too():
    model = use_channels_last(nn.Sequential(nn.Conv3d(2, 4, 3), nn.Conv2d(2, 4, 3)))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)


def test_what_has_no_blocks_or_convolutions_is_refused():
    with pytest.raises(
        ToolkitError, match=r"train\.compile requires a model with repeated blocks, and Linear has no blocks"
    ):
        compile_blocks(nn.Linear(2, 2))
    with pytest.raises(ToolkitError, match=r"train\.channels_last: Linear has no 2-D or 3-D convolution"):
        use_channels_last(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("device", "variable", "said"),
    [("cpu", "CXX", r"has no g\+\+\. Fix: .*apt-get install g\+\+"), ("cuda:0", "CC", "has no gcc or clang. Fix: ")],
)
def test_a_missing_compiler_is_refused_with_ways_to_get_one(monkeypatch, tmp_path, device, variable, said):
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolkitError, match=r"train\.compile: .*" + said):
        check_compiler(device)
    own = tmp_path / "own-compiler"
    own.touch(mode=0o755)
    monkeypatch.setenv(variable, str(own))
    check_compiler(device)
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ToolkitError, match=r"has no .*/Python\.h\. Fix: .*python3-dev"):
        check_compiler(device)

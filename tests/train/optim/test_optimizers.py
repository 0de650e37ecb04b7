"""Which parameter goes to which optimizer and group; two optimizers that look like one; a resume to the last bit."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from toolkit.checkpoint import Checkpointer
from toolkit.errors import ToolkitError
from toolkit.jobs.train_lm import GPT, Arguments
from toolkit.train.optim.optimizers import JointOptimizer, hidden_matrices, optimizer_of
from toolkit.train.schedule import Schedule
from toolkit.train.state import TrainingState
from toolkit.world.facts import World

ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")


def settings(optimizer: str = "adamw", **given: Any) -> SimpleNamespace:
    values = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "momentum": 0.9, "weight_decay": 0.1} | given
    return SimpleNamespace(optimizer=optimizer, **values)


def gpt(**given: Any) -> GPT:
    torch.manual_seed(5)
    return GPT(Arguments(**{"layers": 2, "width": 16, "heads": 2, "context": 8} | given))


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten())


TEXT = torch.arange(16).view(2, 8)


def names_in(model: nn.Module, parameters: list[Tensor]) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]


def test_matrices_decay_vectors_do_not_and_a_tied_weight_is_there_once():
    model = gpt()
    optimizer = optimizer_of(model, settings())
    assert isinstance(optimizer, torch.optim.AdamW)
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"], matrices["betas"]) == (0.1, 0.0, (0.9, 0.95))
    assert all(parameter.dim() == 2 for parameter in matrices["params"])
    assert all(parameter.dim() == 1 for parameter in vectors["params"])
    every = names_in(model, matrices["params"] + vectors["params"])
    assert sorted(every) == sorted(name for name, _ in model.named_parameters())
    assert every.count("token_embedding.weight") == 1
    assert "head.weight" not in every


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_all_else(tied):
    model = gpt(tied=tied)
    optimizer = optimizer_of(model, settings("muon"))
    muon, matrices, vectors = (names_in(model, group["params"]) for group in optimizer.param_groups)
    kinds = ("query_key_value", "attention_out", "perceptron_in", "perceptron_out")
    assert muon == [f"blocks.{number}.{kind}.weight" for number in range(2) for kind in kinds]
    assert matrices == ["token_embedding.weight", "place_embedding.weight"] + ([] if tied else ["head.weight"])
    assert len(muon + matrices + vectors) == len(list(model.parameters()))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]


def test_an_embedding_or_a_tied_weight_in_a_block_is_no_hidden_matrix():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)) for _ in "ab"
            )
            self.layers[1][2].weight = self.first.weight

    model = Odd()
    assert names_in(model, hidden_matrices(model)) == ["layers.0.1.weight", "layers.0.2.weight", "layers.1.1.weight"]
    assert names_in(model, hidden_matrices(model, ["first", "layers.1"])) == ["first.weight", "layers.1.1.weight"]
    model.layers[0].requires_grad_(False)
    assert names_in(model, hidden_matrices(model)) == ["layers.1.1.weight"]


def test_what_does_not_fit_is_refused_by_name():
    flat = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ToolkitError, match=r"train\.optimizer: muon finds no hidden matrix in Sequential.*hidden=\["):
        optimizer_of(flat, settings("muon"))
    with pytest.raises(ToolkitError, match="no parameter middle"):
        optimizer_of(flat, settings("muon"), hidden=["0", "middle"])
    with pytest.raises(ToolkitError, match="no trainable parameter"):
        optimizer_of(flat.requires_grad_(False), settings())
    one = nn.Parameter(torch.zeros(2))
    with pytest.raises(ToolkitError, match="two of the optimizers have the same parameter"):
        JointOptimizer([torch.optim.SGD([one]), torch.optim.AdamW([one])])


def test_a_joint_step_is_the_steps_of_its_members():
    joint_model, model = gpt(dropout=0.0), gpt(dropout=0.0)
    joint = optimizer_of(joint_model, settings("muon"))
    muon = torch.optim.Muon(
        hidden_matrices(model), lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    taken = {id(one) for one in hidden_matrices(model)}
    rest = [one for one in model.parameters() if id(one) not in taken]
    groups = [{"params": [p for p in rest if p.dim() == 2], "weight_decay": 0.1},
              {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0}]  # fmt: skip
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))
    for group in joint.param_groups:
        group["lr"] = 0.02  # as a loop sets it
    for _ in range(3):
        loss_of(joint_model, TEXT).backward()
        joint.step()
        joint.zero_grad()
        loss_of(model, TEXT).backward()
        muon.step()
        adamw.step()
        model.zero_grad()
    for found, expected in zip(joint_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)


def state_of(name: str, model: nn.Module | None = None) -> TrainingState:
    model = model or gpt()
    return TrainingState(model, optimizer_of(model, settings(name)), Schedule(0.01, 10), 5)


def step(state: TrainingState) -> float:
    for group in state.optimizer.param_groups:
        group["lr"] = state.schedule.rate()
    loss = loss_of(state.model, TEXT)
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.schedule.advance()
    state.step += 1
    return loss.item()


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon", "sgd"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_resume_goes_on_to_the_last_bit(name, steps, tmp_path):
    width = 64 if name == "adamw_8bit" else 16  # smaller parameters would have moments in fp32
    state = state_of(name, gpt(width=width))
    for _ in range(steps):
        step(state)
    types = {
        value.dtype for of_one in state.optimizer.state.values() for value in of_one.values() if torch.is_tensor(value)
    }
    assert (torch.uint8 in types) == (name == "adamw_8bit" and steps > 0)
    state.save(Checkpointer(tmp_path, ALONE), ALONE)
    expected = [step(state) for _ in range(3)]
    other = state_of(name, gpt(width=width))
    step(other)  # a state that must not show through
    torch.manual_seed(99)
    other.resume(Checkpointer(tmp_path, ALONE), ALONE)
    assert [step(other) for _ in range(3)] == expected


def test_torchs_own_state_dict_goes_into_the_members():
    state = state_of("muon")
    for _ in range(2):
        step(state)
    other = state_of("muon")
    other.model.load_state_dict(state.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(state.optimizer.state_dict()))
    other.schedule.taken = state.schedule.taken
    drawn = torch.get_rng_state()
    expected = [step(state) for _ in range(3)]
    torch.set_rng_state(drawn)
    assert [step(other) for _ in range(3)] == expected


def test_a_scaler_and_torchs_schedule_take_the_joint_optimizer_for_one():
    state = state_of("muon", gpt(dropout=0.0))
    before = copy.deepcopy(state.model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda step: 0.5**step)
    for overflows in (True, False):
        scaler.scale(loss_of(state.model, TEXT)).backward()
        if overflows:
            state.model.place_embedding.weight.grad[0] = float("inf")  # AdamW's: Muon's matrices must stay, too
        scaler.step(state.optimizer)
        scaler.update()
        state.optimizer.zero_grad()
        moved = [name for name, value in state.model.state_dict().items() if not torch.equal(value, before[name])]
        assert moved == ([] if overflows else list(before))
    scheduler.step()
    assert {group["lr"] for member in state.optimizer.members for group in member.param_groups} == {0.005}


def sharded_like_alone(world) -> None:
    alone = state_of("muon")
    expected = [step(alone) for _ in range(3)]
    model = gpt()
    mesh = init_device_mesh("cpu", (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = state_of("muon", model)
    kept = hidden_matrices(model)
    assert names_in(model, kept)[0] == "blocks.0.query_key_value.weight"
    assert [step(state) for _ in range(3)] == pytest.approx(expected, rel=2e-3)  # muon computes in bf16
    state.save(Checkpointer(world.run_dir / "checkpoints", world), world)
    later = [step(state) for _ in range(2)]
    state.resume(Checkpointer(world.run_dir / "checkpoints", world), world)
    assert [step(state) for _ in range(2)] == later


def test_muon_takes_the_same_steps_on_a_sharded_model_and_resumes_them(tmp_path):
    launch(sharded_like_alone, 2, tmp_path)


def test_a_large_eps_shrinks_the_first_step_of_adamw():
    """The first step is lr * gradient / (|gradient| + eps)."""
    for eps, step in [(1e-8, 0.01), (1.0, 0.005)]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = optimizer_of(model, settings(eps=eps, weight_decay=0.0))
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
        assert model.weight.item() == pytest.approx(1 - step)

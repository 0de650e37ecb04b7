"""What a training state gives back: streams by name, scaler, rates, optimizers, extras; and what it refuses by name."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import ToolkitError
from toolkit.train.randomness import RandomStreams
from toolkit.train.schedule import Schedule
from toolkit.train.state import TrainingState
from toolkit.world.facts import World

ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4))


def adamw(model: nn.Module, **given: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, **given)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)


def fresh(optimizer_of: Any = adamw, model: nn.Module | None = None, **given: Any) -> TrainingState:
    model = model or net()
    optimizer = optimizer_of(model)
    return TrainingState(model, optimizer, Schedule(0.1, 10), 5, **given)


def step(state: TrainingState) -> float:
    """One step on the same samples, with dropout; the loss before it."""
    loss = state.model(torch.ones(3, 4)).square().mean()
    state.optimizer.zero_grad(set_to_none=False)
    loss.backward()
    state.optimizer.step()
    state.step += 1
    return loss.item()


def saved(state: TrainingState, folder: Path) -> Path:
    return state.save(Checkpointer(folder, ALONE), ALONE)


def resumed(state: TrainingState, folder: Path, **given: Any) -> str:
    return state.resume(Checkpointer(folder, ALONE), ALONE, **given)


@pytest.mark.parametrize("optimizer_of", [adamw, momentum, lambda model: torch.optim.NAdam(model.parameters())])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_losses_go_on_to_the_last_bit_also_from_step_0(optimizer_of, steps, tmp_path):
    uncut = fresh(optimizer_of)
    expected = [step(uncut) for _ in range(steps + 3)][steps:]
    state = fresh(optimizer_of)
    for _ in range(steps):
        step(state)
    saved(state, tmp_path)
    assert [step(state) for _ in range(3)] == expected  # a save changes nothing
    other = fresh(optimizer_of)
    torch.manual_seed(99)
    resumed(other, tmp_path)
    assert other.step == steps
    assert [step(other) for _ in range(3)] == expected


def test_a_resume_with_gradients_in_place_still_takes_the_optimizers_state(tmp_path):
    state = fresh()
    step(state)
    saved(state, tmp_path)
    expected = step(state)
    other = fresh()
    other.model(torch.ones(1, 4)).sum().backward()  # a rehearsal whose gradients were left
    gradients = [parameter.grad.clone() for parameter in other.model.parameters()]
    resumed(other, tmp_path)
    assert all(map(torch.equal, gradients, (parameter.grad for parameter in other.model.parameters())))
    assert step(other) == expected


def test_a_parameter_that_never_had_a_gradient_has_no_state_afterwards(tmp_path):
    state = fresh()
    idle = state.model[0].bias
    idle.requires_grad_(False)
    step(state)
    saved(state, tmp_path)
    other = fresh()
    resumed(other, tmp_path)
    assert other.model[0].bias not in other.optimizer.state and len(other.optimizer.state) == 3
    idle.requires_grad_(True)
    state.model.eval(), other.model.eval()
    assert [step(other) for _ in range(3)] == [step(state) for _ in range(3)]


def test_a_parameter_frozen_after_it_was_trained_keeps_its_state(tmp_path):
    state = fresh()
    step(state)
    saved(state, tmp_path)
    other = fresh()
    other.model[0].requires_grad_(False)
    resumed(other, tmp_path)
    assert torch.equal(
        other.optimizer.state[other.model[0].bias]["exp_avg"], state.optimizer.state[state.model[0].bias]["exp_avg"]
    )


class WideMoments(torch.optim.Optimizer):
    """Keeps a float32 moment, a count and a list for each bfloat16 parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                if not kept:
                    kept |= {"count": 0, "moment": torch.zeros_like(parameter, dtype=torch.float32)}
                kept["count"] += 1
                kept["moment"].mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
                parameter.add_(kept["moment"] / kept["count"], alpha=-group["lr"])


def test_moments_wider_than_their_parameters_and_plain_counts_come_back(tmp_path):
    def wide() -> TrainingState:
        return fresh(lambda model: WideMoments(model.parameters()), net().bfloat16())

    def one_step(state: TrainingState) -> None:
        state.model(torch.ones(3, 4, dtype=torch.bfloat16)).square().mean().backward()
        state.optimizer.step()

    state, other = wide(), wide()
    one_step(state)
    saved(state, tmp_path)
    resumed(other, tmp_path)
    for mine, theirs in zip(state.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert theirs["count"] == 1 and theirs["moment"].dtype == torch.float32
        assert torch.equal(mine["moment"], theirs["moment"])


def draws(streams: dict[str, Any]) -> list[float]:
    named = [streams["torch"].initial_seed() and torch.rand(1, generator=streams["torch"]).item()]
    named += [streams["python"].gauss(0, 1), streams["numpy"].integers(100, dtype=np.int32), streams["numpy"].random()]
    return [*named, torch.rand(1).item(), random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()]


def own_streams(seed: int) -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(seed),
        "python": random.Random(seed),
        "numpy": np.random.default_rng(seed),
    }


def renamed(streams: dict[str, Any]) -> dict[str, Any]:
    return {f"own-{name}": stream for name, stream in streams.items()}


def test_every_stream_goes_on_where_it_was(tmp_path):
    streams = own_streams(1)
    draws(streams)  # leaves a spare normal number in Python's and numpy's, and spare bits in PCG64
    state = fresh(streams=renamed(streams))
    saved(state, tmp_path)
    expected = [draws(streams) for _ in range(3)]
    names = {name.removeprefix("random.rank-00000.") for name in read_manifest(tmp_path / "step-00000000").tensors}
    assert names >= {"cpu", "python", "numpy", "own-torch", "own-python", "own-numpy"}
    others = own_streams(2)
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(7)
    said = resumed(fresh(streams=renamed(others)), tmp_path)
    assert [draws(others) for _ in range(3)] == expected
    assert "new random streams" not in said


def test_a_stream_that_was_not_saved_is_derived_and_the_others_go_on(tmp_path):
    saved(fresh(), tmp_path)
    expected = torch.rand(1).item()

    def resume_with_data() -> tuple[str, torch.Tensor, float]:
        data = torch.Generator()
        said = resumed(fresh(streams={"data": data}), tmp_path)
        return said, data.get_state(), torch.rand(1).item()

    said, first, drawn = resume_with_data()
    assert said.endswith("; all ranks use new random streams (data), as the checkpoint lacks them")
    assert torch.equal(resume_with_data()[1], first) and drawn == expected
    assert not torch.equal(first, torch.Generator().get_state())


def test_streams_that_cannot_be_saved_are_refused_at_once():
    with pytest.raises(ToolkitError, match=r"streams\.cpu: 'cpu' is the name of a global random stream"):
        fresh(streams={"cpu": torch.Generator()})
    with pytest.raises(
        ToolkitError, match=r"streams\.data: toolkit cannot save the state of a numpy\.random\._generator\.Generator"
    ):
        fresh(streams={"data": np.random.Generator(np.random.Philox(1))})


def test_ranks_derive_streams_of_their_own():
    states = []
    for rank in range(2):
        streams = RandomStreams("cpu")
        streams.derive(streams.names, seed=1, step=2, rank=rank)
        states.append(streams.states())
    assert not any(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_gradient_scaler_goes_on_and_its_settings_come_from_the_job(tmp_path):
    def scaler(**given: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=1024.0, **given)

    state = fresh(scaler=scaler(growth_interval=2))
    for _ in range(3):
        loss = state.model(torch.ones(3, 4)).square().mean()
        state.scaler.scale(loss).backward()
        state.scaler.step(state.optimizer)
        state.scaler.update()
    saved(state, tmp_path)
    other = fresh(scaler=scaler(growth_interval=5))
    resumed(other, tmp_path)
    assert (other.scaler.get_scale(), other.scaler._get_growth_tracker()) == (2048.0, 1)
    assert other.scaler.get_growth_interval() == 5
    off = fresh(scaler=scaler(enabled=False))
    assert resumed(off, tmp_path).endswith("; the gradient scaler of the checkpoint is ignored")
    saved(off, tmp_path / "off")
    assert resumed(other, tmp_path / "off").endswith(
        "; the gradient scaler starts from its initial scale, because the checkpoint has no scale"
    )


SCHEDULERS = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "milestones": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 12),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


def scheduled(kind: str, lr: float = 0.1) -> TrainingState:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return TrainingState(model, optimizer, SCHEDULERS[kind](optimizer), 5)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_torchs_schedulers_go_on_with_the_rate_that_they_had(kind, tmp_path):
    def settings(state: TrainingState) -> list[Any]:
        step(state)
        state.schedule.step(*([1.0] if kind == "plateau" else []))
        (group,) = state.optimizer.param_groups
        return [group["lr"], group["betas"], group.get("initial_lr")]

    state = scheduled(kind)
    for _ in range(3):
        settings(state)
    saved(state, tmp_path)
    expected = [settings(state) for _ in range(4)]
    other = scheduled(kind)
    resumed(other, tmp_path)
    assert [settings(other) for _ in range(4)] == expected
    if kind == "milestones":
        assert type(other.schedule.milestones) is Counter


def test_settings_that_the_run_did_not_change_come_from_the_job(tmp_path):
    state = fresh(lambda model: adamw(model, weight_decay=0.1))
    state.optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    saved(state, tmp_path)
    other = fresh(lambda model: adamw(model, weight_decay=0.3))
    resumed(other, tmp_path)
    (group,) = other.optimizer.param_groups
    assert (group["weight_decay"], group["betas"]) == (0.3, (0.5, 0.6))
    split = fresh(lambda model: torch.optim.AdamW([{"params": part.parameters()} for part in (model[0], model[2])]))
    assert resumed(split, tmp_path).endswith(
        "; the optimizer has 2 parameter groups, but the checkpoint has 1: their learning rates start from the beginning"
    )


class Sampler:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_extras_epoch_and_a_second_model_come_back(tmp_path):
    sampler = Sampler()
    sampler.seen.append(4)
    average = torch.optim.swa_utils.AveragedModel(net())
    average.update_parameters(net())
    state = fresh(extra={"sampler": sampler, "best": float("-inf"), "cells": (1, None)}, modules={"ema": average})
    state.epoch, state.samples = 2, 96
    saved(state, tmp_path)
    other = fresh(
        extra={"sampler": Sampler(), "best": 0.0, "cells": (), "later": 1},
        modules={"ema": torch.optim.swa_utils.AveragedModel(nn.Sequential(*net()).requires_grad_(False))},
    )
    assert resumed(other, tmp_path).endswith("; the checkpoint has no later")
    assert other.extra["sampler"].seen == [4]
    assert (other.extra["best"], other.extra["cells"], other.extra["later"]) == (float("-inf"), (1, None), 1)
    assert (other.epoch, other.samples, int(other.modules["ema"].n_averaged)) == (2, 96, 1)
    said = resumed(fresh(), tmp_path)
    assert said.endswith(
        "; not restored from the checkpoint: best, cells, sampler; the module ema of the checkpoint is ignored"
    )


def test_what_json_cannot_hold_is_refused_by_name_and_nothing_is_committed(tmp_path):
    with pytest.raises(ToolkitError, match=r"extra'\]\['when'\]: a value of type builtins\.object cannot be stored"):
        saved(fresh(extra={"when": object()}), tmp_path)
    assert not list(tmp_path.glob("step-????????"))


def test_another_optimizer_model_or_schedule_is_refused_with_all_that_differs(tmp_path):
    state = fresh()
    step(state)
    saved(state, tmp_path)
    with pytest.raises(
        ToolkitError, match=r"0\.weight\.exp_avg, .*2\.bias\.step and 2 more, which this job does not have"
    ):
        resumed(fresh(lambda model: torch.optim.SGD(model.parameters(), lr=0.1)), tmp_path)
    with pytest.raises(ToolkitError, match=r"lacks optimizer\.0\.weight\.max_exp_avg_sq, .*2\.bias\.max_exp_avg_sq"):
        resumed(fresh(lambda model: adamw(model, amsgrad=True)), tmp_path)
    with pytest.raises(ToolkitError, match=r"contains model\.2\.weight, model\.2\.bias, optimizer\.2"):
        resumed(fresh(model=net()[:2]), tmp_path)
    with pytest.raises(ToolkitError, match="schedule: expected state with T_max"):
        resumed(scheduled("cosine"), tmp_path)


def test_a_model_of_other_shapes_is_refused_with_all_of_them(tmp_path):
    state = fresh()
    step(state)
    saved(state, tmp_path)
    first, second, third = net()
    wider = nn.Sequential(nn.Linear(first.in_features, first.out_features + 1), second)
    wider.append(nn.Linear(first.out_features + 1, third.out_features)).append(nn.Linear(third.out_features, 5))
    with pytest.raises(ToolkitError) as refused:
        resumed(fresh(model=wider), tmp_path)
    assert refused.value.message.startswith(
        "the checkpoint lacks model.3.bias, model.3.weight; has other shapes: model.0.weight (saved: ["
    )
    for name in ("model.0.bias", "model.2.weight", "optimizer.0.weight.exp_avg", "optimizer.2.weight.exp_avg_sq"):
        assert f"{name} (saved: [" in str(refused.value)


def test_of_many_tensors_that_differ_the_first_ten_are_named(tmp_path):
    deep = lambda width: fresh(model=nn.Sequential(*(nn.Linear(width, width) for _ in range(6))))  # noqa: E731
    saved(deep(2), tmp_path)
    with pytest.raises(ToolkitError) as refused:
        resumed(deep(3), tmp_path)
    assert refused.value.message.count("(saved: ") == 10
    assert refused.value.message.endswith("model.4.bias (saved: [2], this job: [3]) and 2 more")


def test_an_optimizer_with_foreign_parameters_is_refused(tmp_path):
    state = fresh(lambda model: torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], momentum=0.9))
    state.optimizer.param_groups[0]["params"][-1].grad = torch.ones(1)
    step_without_zeroing = state.model(torch.ones(3, 4)).sum()
    step_without_zeroing.backward()
    state.optimizer.step()
    with pytest.raises(ToolkitError, match="the optimizer has parameters that the model does not have"):
        saved(state, tmp_path)

"""Types of the computation, and a gradient scaler whose ranks agree on an overflow."""

from __future__ import annotations

import math

import pytest
import torch
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from toolkit.train.optim.precision import agree_found_inf, autocast, computed_in, found_inf_of, gradient_scaler


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_forward_passes_compute_in_the_type_that_is_asked_for(precision, dtype):
    model = nn.Linear(4, 4)
    with autocast("cpu", precision):
        assert model(torch.ones(1, 4)).dtype == dtype
    assert model.weight.dtype == torch.float32
    assert gradient_scaler("cpu", precision).is_enabled() == (precision == "fp16")


def test_auto_is_bf16_on_a_gpu():
    assert computed_in("cuda:0", "auto") == torch.bfloat16


def test_an_overflow_leaves_a_step_out_and_halves_the_scale():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = gradient_scaler("cpu", "fp16", first_scale=1024.0)
    before = model.weight.detach().clone()
    for worst, scale in ((math.inf, 512.0), (math.nan, 256.0)):
        scaler.scale(model(torch.tensor([[1.0, worst]])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == scale
        assert torch.equal(model.weight, before)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(model.weight, before - 0.1)


def test_the_private_name_holds_what_unscale_found():
    """`found_inf_of` reads torch's own notes: another torch that keeps them elsewhere fails here."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    scaler = gradient_scaler("cpu", "fp16")
    scaler.scale(weight.sum()).backward()
    weight.grad[0] = math.inf
    scaler.unscale_(optimizer)
    assert found_inf_of(scaler, optimizer).item() == 1.0


def stage_with_an_overflow(world) -> None:
    """Each rank has a parameter of its own, as a stage of a pipeline has; only rank 1's gradient overflows."""
    weight = nn.Parameter(torch.ones(2), requires_grad=world.rank != 2)
    frozen = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight, frozen], lr=1.0)
    for overflows in (True, False):
        scaler = gradient_scaler("cpu", "fp16", first_scale=64.0)
        loss = scaler.scale((weight * torch.tensor([1.0, math.inf if overflows and world.rank == 1 else 1.0])).sum())
        if world.rank != 2:  # which has no gradient at all
            loss.backward()
        scaler.unscale_(optimizer)
        agree_found_inf(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (32.0 if overflows else 64.0)
        assert weight.tolist() == ([1.0, 1.0] if overflows or world.rank == 2 else [0.0, 0.0])


def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(tmp_path):
    launch(stage_with_an_overflow, 3, tmp_path)


def shards_with_an_overflow(world) -> None:
    """torch itself agrees on DTensors, which `agree_found_inf` relies on and does not disturb."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for overflows in (True, False):
        scaler = gradient_scaler("cpu", "fp16", first_scale=64.0)
        before = model.weight.to_local().detach().clone()
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        if overflows and world.rank == 1:
            model.weight.grad.to_local()[0, 0] = math.inf
        scaler.unscale_(optimizer)
        agree_found_inf(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (32.0 if overflows else 64.0)
        assert torch.equal(model.weight.to_local(), before) == overflows


def test_an_overflow_in_one_shard_leaves_the_step_out_on_all(tmp_path):
    launch(shards_with_an_overflow, 2, tmp_path)

"""A model that is built without memory: its parameters come from seed and name, its buffers from the constructor."""

from __future__ import annotations

import torch
from torch import nn

from toolkit.parallel.materialise import materialise, parameters_on_meta


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.head.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("drawn", torch.randn(3))


def initialise(name: str, tensor: torch.Tensor) -> None:
    nn.init.normal_(tensor)


def made(seed: int = 1) -> Model:
    with parameters_on_meta(0):
        model = Model()
    assert all(parameter.is_meta for parameter in model.parameters())
    materialise(model, initialise, seed, "cpu")
    return model


def test_buffers_keep_the_constructors_values():
    model = made()
    assert torch.equal(model.mask, torch.ones(4, 4).tril().bool())
    assert torch.equal(model.norm.running_var, torch.ones(4))
    torch.manual_seed(99)
    assert torch.equal(model.drawn, made().drawn), "ranks with other seeds draw the same"


def test_parameters_follow_seed_and_name_alone_and_ties_stay():
    torch.manual_seed(1)
    one = made()
    torch.manual_seed(2)
    other = made()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.head.weight, made(seed=2).head.weight)
    assert one.tied.weight is one.head.weight
    assert [name for name, _ in one.named_parameters()] == ["head.weight", "head.bias", "norm.weight", "norm.bias"]


def test_what_is_made_afterwards_is_as_ever_and_draws_as_if_nothing_had_been():
    torch.manual_seed(5)
    wanted = nn.Linear(2, 2).weight.clone()
    torch.manual_seed(5)
    made()
    assert torch.equal(nn.Linear(2, 2).weight, wanted)

"""Blocks whose parameters are in memory only while they compute: models that end their backward passes in unusual ways."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from toolkit.train.memory import streamed_optimizer
from toolkit.train.memory.offload_activations import _Activations, offload_activations
from toolkit.train.memory.offload_gradients import OffloadedGradients
from toolkit.train.memory.offload_parameters import StreamedParameters
from toolkit.train.memory.streamed_optimizer import StreamedOptimizer
from toolkit.train.memory.tier import FileTier, HostTier, Tier

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return stream + self.out(torch.tanh(self.into(self.norm(stream))))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        if kind == "tied":
            self.head.weight = self.embedding.weight
        self.embedding.requires_grad_(kind != "frozen embedding")
        if kind == "frozen block":
            self.blocks[1].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if self.kind == "left out" and number == 1:
                continue
            if self.kind == "by keyword":
                stream = block(stream=stream)
            elif self.kind == "recomputed":
                stream = checkpoint(block, stream, use_reentrant=False)
            else:
                stream = block(stream)
        return self.head(stream)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setitem(streamed_optimizer._CHUNK_BYTES, "cpu", 10_000)


def losses_of(kind: str, tier: Tier | None, offload: tuple[str, ...] = (), *, passes: int = 2) -> list[float]:
    """With one pass per step, and a tier, parameters are updated in the backward pass."""
    torch.manual_seed(0)
    model = Model(kind)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
    if tier is not None:
        gradients = OffloadedGradients(trained, tier) if "gradients" in offload else None
        optimizer = StreamedOptimizer(optimizer, tier, gradients)
        if "parameters" in offload:
            optimizer.parameters = StreamedParameters(model, list(model.blocks), tier)
        if "activations" in offload:
            offload_activations(list(model.blocks), tier)
    found = []
    for step in range(4):
        for part in range(passes):
            tokens = torch.randint(0, 50, (64, 9), generator=torch.Generator().manual_seed(2 * step + part))
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            with optimizer.updating() if tier is not None and passes == 1 else nullcontext():
                loss.backward()
            found.append(loss.item())
        if passes > 1:
            with torch.no_grad():
                found.append(model(tokens).sum().item())  # a validation between passes
        optimizer.step()
        optimizer.zero_grad()
    return found


KINDS = ("plain", "tied", "frozen embedding", "frozen block", "by keyword", "left out", "recomputed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offload", [("parameters",), ("gradients", "parameters", "activations")], ids=str)
def test_every_loss_is_that_of_a_model_in_memory(tmp_path, kind, offload):
    tier = FileTier(tmp_path) if len(offload) > 1 else HostTier("cpu")
    offload = tuple(part for part in offload if part != "activations" or kind != "recomputed")
    assert losses_of(kind, tier, offload) == losses_of(kind, None)
    assert tier.traffic.read_bytes > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offload", [("gradients",), ("gradients", "parameters")], ids=str)
def test_updates_in_the_backward_pass_are_those_after_it(tmp_path, kind, offload):
    tier = FileTier(tmp_path)
    assert losses_of(kind, tier, offload, passes=1) == losses_of(kind, None, passes=1)
    assert tier.traffic.read_bytes > 0
    if offload == ("gradients",):
        moved = tier.traffic
        assert moved.read_bytes * 4 == moved.written_bytes * 3, "state moves once a step, and is not read in the first"


def test_between_steps_the_blocks_need_no_memory():
    model, tier = Model("plain"), HostTier("cpu")
    StreamedParameters(model, list(model.blocks), tier)
    for _ in range(2):
        model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
        left = [one.untyped_storage().nbytes() for block in model.blocks for one in block.parameters()]
        assert set(left) == {0}
        assert model.head.weight.untyped_storage().nbytes() > 0


def test_saved_activations_leave_nothing_behind(monkeypatch):
    states: list[_Activations] = []
    plain = _Activations.enter

    def noted(self: _Activations, *given: Any) -> None:
        states.append(self)
        plain(self, *given)

    monkeypatch.setattr(_Activations, "enter", noted)
    losses_of("plain", HostTier("cpu"), ("activations",))
    assert sum(len(of_block) for of_block in states[0].saved.values()) == 0

"""Attention over ranks that share sequences is that of one process, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import results_of
from sampling import sampled
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from toolkit.errors import ToolkitError
from toolkit.parallel.context.attention import Attention, Positions, check_context, split_context
from toolkit.parallel.context.order import own_tokens
from toolkit.world.facts import World

BATCH, WIDTH = 2, 8


def random_heads(tokens: int, heads: int, key_heads: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = [(BATCH, one, tokens, WIDTH) for one in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def own(tensor: Tensor, world: World) -> Tensor:
    return own_tokens(tensor.transpose(1, 2), world.rank, world.size).transpose(1, 2)


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def differences(world: World, tokens: int, heads: list[int], is_causal: bool, method: str, dtype: str) -> list[float]:
    """How far outputs and gradients of queries, keys and values are from those of whole sequences."""
    *given, gradient = random_heads(tokens, *heads, getattr(torch, dtype))
    whole = [one.clone().requires_grad_() for one in given]
    wanted = scaled_dot_product_attention(*whole, is_causal=is_causal, enable_gqa=heads[0] != heads[1])
    wanted.backward(gradient)
    parts = [own(one, world).clone().requires_grad_() for one in given]
    attention = Attention()
    assert dist.group.WORLD is not None
    split_context(attention, dist.group.WORLD, method)
    mixed = attention(*parts, is_causal=is_causal)
    mixed.backward(own(gradient, world))
    pairs = [
        (mixed.detach(), wanted.detach()),
        *((part.grad, one.grad) for part, one in zip(parts, whole, strict=True)),
    ]
    return [apart(found, own(right, world)) for found, right in pairs]


CASES = [
    (2, [4, 4], True, "ring", "float32"),
    (2, [4, 2], False, "ring", "float32"),
    (2, [3, 3], True, "auto", "float32"),
    (2, [4, 4], True, "ring", "bfloat16"),
    (4, [4, 4], True, "ring", "float32"),
    (4, [8, 2], True, "auto", "float32"),
]


@pytest.mark.parametrize(
    ("ranks", "heads", "is_causal", "method", "dtype"), sampled(CASES, lambda case: case in (CASES[1], CASES[4]))
)
def test_a_ring_computes_the_attention_of_one_process(tmp_path, ranks, heads, is_causal, method, dtype):
    found = results_of(differences, ranks, tmp_path / "run", 16 * ranks, heads, is_causal, method, dtype)
    assert max(max(one) for one in found) < (1e-6 if dtype == "float32" else 1e-2), found


def test_exchanged_heads_compute_it_to_the_last_bit(tmp_path):
    found = results_of(differences, 2, tmp_path / "run", 24, [4, 2], True, "heads", "float32")
    assert found == [[0.0] * 4] * 2


def refusals(world: World) -> dict[str, str]:
    """Return the errors of attention, and the positions of this rank."""
    assert dist.group.WORLD is not None
    model = nn.ModuleList([Attention(), Positions()])
    query = torch.zeros(1, 3, 4, WIDTH)
    refused: dict[str, Any] = {}
    for name, method, dropout in (("heads", "heads", 0.0), ("dropout", "auto", 0.5)):
        split_context(model, dist.group.WORLD, method)
        try:
            model[0](query, query, query, dropout=dropout)
        except ToolkitError as error:
            refused[name] = str(error)
    return refused | {"positions": model[1](torch.zeros(1, 4)).tolist()}


def test_what_ranks_cannot_do_is_refused(tmp_path):
    first, second = results_of(refusals, 2, tmp_path / "run")
    assert first["heads"] == (
        "parallel.context: expected a number of heads divisible by cp = 2, got 3 query heads and 3 key heads on each "
        'tensor-parallel rank. Fix: use context = "ring", or another cp'
    )
    assert first["dropout"] == (
        "parallel.context: expected attention without dropout, which a ring does not support, got dropout = 0.5. "
        'Fix: set the dropout of attention to 0, or context = "heads" with a number of heads divisible by cp'
    )
    assert (first["positions"], second["positions"]) == ([0, 1, 6, 7], [2, 3, 4, 5])


@pytest.mark.parametrize(("model", "lacking"), [(nn.Linear(2, 2), "Attention"), (Attention(), "Positions")])
def test_a_model_whose_attention_ranks_cannot_split_is_refused(model, lacking):
    check_context(model, 1)
    with pytest.raises(
        ToolkitError, match=f"cp = 2 splits sequences, but {type(model).__name__} has no module {lacking}"
    ):
        check_context(model, 2)

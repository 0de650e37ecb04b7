"""Recomputed blocks: the same gradients to the last bit, fewer saved bytes, and the cheapest choice under a budget."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy

from toolkit.errors import ToolkitError
from toolkit.jobs.train_lm import GPT, Arguments, loss_of
from toolkit.train.activations import Activations, BlockActivations, cheapest, measure_activations, saved_bytes
from toolkit.train.blocks import blocks_of
from toolkit.train.recompute import _policy, forget_recompute, is_recomputed, recompute, recompute_block

TEXT = torch.arange(128).view(4, 32) % 256
BATCH = (TEXT, TEXT)


def settings(kind: str, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(
        recompute=kind, **{"recompute_every": 1, "recompute_above_mb": 0.0, "activation_budget_gb": 0.0} | given
    )


def gpt(**given: Any) -> GPT:
    torch.manual_seed(5)
    return GPT(Arguments(**{"layers": 3, "width": 32, "heads": 2, "context": 32, "dropout": 0.3} | given))


def gradients(model: nn.Module, precision: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(11)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        found = loss(model)
    found.backward()
    grown = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return [found.detach(), torch.rand(4), *grown]  # the stream goes on as without recomputation


def loss(model: nn.Module) -> Tensor:
    return loss_of(model(TEXT), TEXT)


def measured(model: nn.Module) -> Activations:
    return measure_activations(model, partial(loss, model), blocks_of(model))


KINDS = [
    settings("every"),
    settings("every", recompute_every=2),
    settings("selective"),
    settings("large", recompute_above_mb=0.01),
    settings("budget", activation_budget_gb=0.001),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.recompute}-{kind.recompute_every}")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_to_the_last_bit_with_dropout_and_fewer_bytes_are_kept(kind, precision):
    plain, model = gpt(), gpt()
    names = recompute(model, kind, loss_of=loss_of, micro_batch=BATCH)
    assert names
    assert names == [name for name, block in blocks_of(model).items() if is_recomputed(block)]
    for found, expected in zip(gradients(model, precision), gradients(plain, precision), strict=True):
        assert torch.equal(found, expected)
    kept = [saved_bytes(partial(loss, one), one) for one in (model, plain)]
    assert kept[0] < kept[1]
    assert list(model.state_dict()) == list(plain.state_dict())


def test_each_block_that_recomputes_frees_what_was_measured():
    model = gpt()
    before = measured(model)
    total = saved_bytes(partial(loss, model), model)
    assert total == before.other_bytes + sum(block.saved_bytes for block in before.blocks)
    recompute(model, settings("every", recompute_every=2))
    freed = total - saved_bytes(partial(loss, model), model)
    block = before.blocks[1]
    assert freed == pytest.approx(block.saved_bytes - block.input_bytes, abs=block.input_bytes)
    assert block.flops > 0
    assert block.input_bytes == 4 * 32 * 32 * 4


def test_selective_keeps_matrix_products_and_so_more_than_all():
    kept = {}
    for kind in ("every", "selective", "none"):
        model = gpt(dropout=0.0)
        recompute(model, settings(kind))
        kept[kind] = saved_bytes(partial(loss, model), model)
    counted = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted.append(str(operation))
            return operation(*args, **(kwargs or {}))

    products = {}
    for kind in ("none", "every", "selective"):
        model = gpt(dropout=0.0)
        recompute(model, settings(kind))
        found = loss(model)
        counted.clear()
        with Counting():
            found.backward()
        products[kind] = sum(name.startswith(("aten.mm", "aten.addmm", "aten.bmm")) for name in counted)
    assert products["selective"] == products["none"] < products["every"]


def test_measuring_changes_neither_streams_nor_buffers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    measure_activations(model, lambda: model(torch.randn(2, 3, 8, 8)), {})
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_copy_computes_with_its_own_weights():
    model = gpt()
    recompute(model, settings("every"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(is_recomputed(block) for block in other.blocks)
    plain = gpt()
    for found, expected in zip(gradients(other), gradients(plain), strict=True):
        assert torch.equal(found, expected)


def test_it_can_be_asked_for_twice_and_undone():
    model = gpt()
    total = saved_bytes(partial(loss, model), model)
    for block in (model.blocks[0], model.blocks[0]):
        recompute_block(block)
    forget_recompute(model)
    assert not any(is_recomputed(block) for block in model.blocks)
    assert saved_bytes(partial(loss, model), model) == total


def test_what_cannot_be_done_is_refused_with_the_fix():
    with pytest.raises(ToolkitError, match="Linear has no blocks, which are needed for activation checkpointing"):
        recompute(nn.Linear(2, 2), settings("every"))
    with pytest.raises(ToolkitError, match="give recompute"):
        recompute(gpt(), settings("large", recompute_above_mb=1.0))
    with pytest.raises(
        ToolkitError, match=r"train\.activation_budget_gb: activations take .* when the 3 blocks"
    ) as refused:
        recompute(gpt(), settings("budget", activation_budget_gb=1e-5), loss_of=loss_of, micro_batch=BATCH)
    enough = float(refused.value.fix.split()[3])
    assert (
        len(recompute(gpt(), settings("budget", activation_budget_gb=enough), loss_of=loss_of, micro_batch=BATCH)) > 0
    )
    assert recompute(gpt(), settings("budget", activation_budget_gb=9.0), loss_of=loss_of, micro_batch=BATCH) == []


costs = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20), st.integers(0, 50)).map(
        lambda three: (three[0] + three[1], three[1], three[2])
    ),
    min_size=1,
    max_size=7,
)


def activations(blocks: list[tuple[int, int, int]], other: int = 5) -> Activations:
    return Activations(tuple(BlockActivations(str(number), *one) for number, one in enumerate(blocks)), other)


def best_flops(model: Activations, budget: int) -> int | None:
    names = [block.name for block in model.blocks]
    choices = itertools.chain.from_iterable(itertools.combinations(names, size) for size in range(len(names) + 1))
    fitting = [choice for choice in choices if model.peak_bytes(choice) <= budget]
    return min((flops(model, choice) for choice in fitting), default=None)


def flops(model: Activations, names: Any) -> int:
    return sum(block.flops for block in model.blocks if block.name in names)


def test_the_peak_is_where_one_block_is_whole_again_or_the_forward_pass_ends():
    model = activations([(10, 1, 1), (20, 2, 1), (30, 3, 1)])
    assert model.peak_bytes([]) == 5 + 60
    assert model.peak_bytes(["0"]) == 5 + 1 + 20 + 30
    assert model.peak_bytes(["0", "1", "2"]) == 5 + 1 + 2 + 3 + 30, "the last block beside the inputs of all"
    assert model.peak_bytes(["2"]) == 5 + 10 + 20 + 3 + 30, "what is wanted at once is not worth giving up"
    assert model.peak_bytes(["0", "1"]) == 5 + 1 + 2 + 30


@given(blocks=costs, budget=st.integers(1, 300))
def test_a_choice_meets_the_budget_and_holds_nothing_that_is_not_needed(blocks, budget):
    model = activations(blocks)
    try:
        chosen = cheapest(model, budget)
    except ToolkitError:
        assert (
            model.peak_bytes([block.name for block in model.blocks if block.saved_bytes > block.input_bytes]) > budget
        )
        return
    assert model.peak_bytes(chosen) <= budget
    for name in chosen:
        assert model.peak_bytes([one for one in chosen if one != name]) > budget


@given(
    count=st.integers(1, 7),
    block=st.tuples(st.integers(21, 60), st.integers(0, 20), st.integers(1, 50)),
    share=st.floats(0, 1),
)
def test_of_equal_blocks_as_few_recompute_as_can(count, block, share):
    model = activations([block] * count)
    least, most = model.peak_bytes([str(number) for number in range(count)]), model.peak_bytes([])
    budget = max(least, int(least + share * (most - least)))
    assert flops(model, cheapest(model, budget)) == best_flops(model, budget)


def on_shards(world) -> None:
    found = []
    for kind in ("none", "every", "selective"):
        model = gpt()
        recompute(model, settings(kind))
        mesh = init_device_mesh("cpu", (world.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.manual_seed(world.rank)
        loss(model).backward()
        found.append([parameter.grad.to_local() for parameter in model.parameters()])
    for grown in found[1:]:
        assert all(torch.equal(one, plain) for one, plain in zip(grown, found[0], strict=True))


def test_a_sharded_model_recomputes_to_the_last_bit(tmp_path):
    launch(on_shards, 2, tmp_path)


def test_attention_that_draws_numbers_is_recomputed_with_all_else_that_draws():
    aten = torch.ops.aten
    for operation in (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ):
        schema = [argument.name for argument in operation._schema.arguments]
        place = schema.index("dropout_p")
        for dropout, expected in ((0.0, CheckpointPolicy.MUST_SAVE), (0.1, CheckpointPolicy.PREFER_RECOMPUTE)):
            given = [None] * place + [dropout]
            assert _policy(None, operation, *given) == expected
            assert _policy(None, operation, *given[:3], dropout_p=dropout) == expected
    assert _policy(None, aten.gelu.default) == CheckpointPolicy.PREFER_RECOMPUTE

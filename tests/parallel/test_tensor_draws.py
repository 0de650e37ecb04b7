"""Dropout on tensor parallel ranks: one mask where they hold the same, masks of their own where they hold pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import results_of
from sampling import sampled
from tensor_cases import job, laid, micro_batches, step_of, take_steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from toolkit.errors import ToolkitError
from toolkit.parallel.tensor import PieceDraws
from toolkit.train.randomness import seed_rank


def draw(place: int, training: bool = True) -> list[Tensor]:
    """Before pieces, on them, between, on them again, behind them; from the same state every time."""
    torch.manual_seed(0)
    draws, module = PieceDraws("cpu", place), nn.Identity().train(training)
    drawn = [torch.rand(8)]
    for _ in range(2):
        draws.begin(module)
        draws.enter(module)
        draws.enter(module)  # as query, key and value by matrices of their own do
        assert draws.on_pieces is training
        drawn.append(torch.rand(8))
        draws.leave(module)
        drawn.append(torch.rand(8))
    return drawn


def test_ranks_differ_on_pieces_alone_and_repeat_what_they_drew():
    with torch.random.fork_rng():
        one, other, again, still = draw(0), draw(1), draw(0), draw(0, training=False)
        torch.manual_seed(0)
        alone = [torch.rand(8) for _ in range(5)]
    assert [torch.equal(*pair) for pair in zip(one, other, strict=True)] == [True, False, True, False, True]
    assert torch.equal(torch.stack(one), torch.stack(again))
    assert len({tuple(drawn.tolist()) for drawn in (*one, other[1], other[3])}) == 7, "no draw comes twice"
    assert torch.equal(torch.stack(still), torch.stack(alone)), "a model that does not train draws as on one rank"


def test_a_block_begins_off_pieces_where_the_one_before_ended_in_the_middle():
    draws, module = PieceDraws("cpu", 0), nn.Identity()
    with torch.random.fork_rng():
        draws.enter(module)
        draws.begin(module)
        assert not draws.on_pieces


def peeked() -> Tensor:
    state = torch.get_rng_state()
    following = torch.rand(4)
    torch.set_rng_state(state)
    return following


def draws_of(world, config) -> dict[str, Any]:
    """What each call of dropout and attention would draw on this rank, and the rank's place on the mesh."""
    from toolkit.jobs import train_lm

    model = laid(world, config)
    step = step_of(model, config)
    seed_rank(config.train.seed, 0, model.stream[0])
    drawn: dict[str, list[Tensor]] = {"dropout": [], "attention": []}
    functional = train_lm.nn.functional
    dropout, attention = functional.dropout, functional.scaled_dot_product_attention

    def watched(kind, function):
        def call(*given, **named):
            drawn[kind].append(peeked())
            return function(*given, **named)

        return call

    functional.dropout = watched("dropout", dropout)
    functional.scaled_dot_product_attention = watched("attention", attention)
    step.take(micro_batches(model, config, 0))
    functional.dropout, functional.scaled_dot_product_attention = dropout, attention
    return {
        "drawn": {kind: [draw.tolist() for draw in draws] for kind, draws in drawn.items()},
        "following": peeked().tolist(),
        "stream": tuple(model.stream),
        "data": (model.mesh.data_rank, model.mesh.data_size),
        "tp": dist.get_process_group_ranks(model.mesh.group("tp")),
    }


def draws_and_steps(world, configs) -> list[dict[str, Any]]:
    """The draws with each job, after which all ranks of tp must hold the same parameters."""
    found = []
    for config in configs:
        found.append(draws_of(world, config))
        take_steps(world, config)
    return found


def check_draws(config, by_rank: list[dict[str, Any]]) -> None:
    """Ranks of tp draw alike exactly where they hold the same values, and each data rank has its own stream."""
    for own in by_rank:
        assert own["stream"] == own["data"]
        for kind, draws in own["drawn"].items():
            parts = [by_rank[rank]["drawn"][kind] for rank in own["tp"]]
            is_same = kind == "dropout" and not config.parallel.sequence
            different = {tuple(draw) for part in parts for draw in part}
            assert len(different) == (len(draws) if is_same else len(draws) * len(parts)), kind


def test_dropout_is_one_on_the_stream_and_apart_on_heads_and_on_pieces_of_the_sequence(tmp_path):
    args = {"dropout": 0.3}
    configs = [job({"tp": 2}, args), job({"tp": 2, "sequence": True}, args)]
    by_rank = results_of(draws_and_steps, 2, tmp_path, configs)
    for number, config in enumerate(configs):
        check_draws(config, [results[number] for results in by_rank])


def changed_by_recomputing(world, configs) -> list[list[str]]:
    """The values of each job that change when blocks are run again for their backward pass."""
    from toolkit.jobs import train_lm

    def forward(model, text: Tensor) -> Tensor:
        stream = model._embedded(text)
        for block in model.blocks:
            stream = checkpoint(block, stream, use_reentrant=False)
        return model.head(model.norm(stream))

    plain = train_lm.GPT.forward
    changed = []
    for config in configs:
        train_lm.GPT.forward = plain
        kept = take_steps(world, config)
        train_lm.GPT.forward = forward
        again = take_steps(world, config)
        changed.append([name for name in kept if not torch.equal(kept[name], again[name])])
    return changed


def test_blocks_that_are_run_again_drop_the_same(tmp_path):
    args = {"dropout": 0.3}
    configs = [job({"tp": 2}, args), job({"tp": 2, "sequence": True}, args)]
    assert results_of(changed_by_recomputing, 2, tmp_path, configs) == [[[], []], [[], []]]


def error_of_seeds_by_rank(world, config) -> str:
    """The error of a step whose ranks of tp were seeded differently."""
    model = laid(world, config)
    step = step_of(model, config)
    step.rehearse(micro_batches(model, config, 0)[0])
    seed_rank(config.train.seed, 0, world.rank)
    with pytest.raises(ToolkitError) as refused:
        step.take(micro_batches(model, config, 0))
    return str(refused.value)


def test_ranks_that_drop_differently_what_they_have_alike_are_refused(tmp_path):
    errors = results_of(error_of_seeds_by_rank, 2, tmp_path, job({"tp": 2}, {"dropout": 0.1}))
    message = "differ between tensor-parallel ranks. Fix: seed the ranks by DistributedModel.stream"
    assert [message in error for error in errors] == [True, True], errors


@pytest.mark.parametrize("sequence", sampled([False, True], lambda case: case[0]))
def test_shares_of_the_batch_draw_apart(tmp_path, sequence):
    config = job({"tp": 2, "replicate": 2, "sequence": sequence}, {"dropout": 0.3})
    by_rank = results_of(draws_of, 4, tmp_path, config)
    check_draws(config, by_rank)
    assert {own["data"][1] for own in by_rank} == {2}
    assert len({tuple(own["following"]) for own in by_rank}) == 2

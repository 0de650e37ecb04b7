"""Replicas that differ by one bit end the run, with the name of the rank."""

from __future__ import annotations

import re
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
from launch import launch, results_of, said_by
from sampling import sampled
from torch import nn

from toolkit.errors import ToolkitError
from toolkit.parallel.replica_check import check_replicas
from toolkit.world.facts import World


def flip_a_bit(parameter: torch.Tensor) -> None:
    """Change the lowest bit of one element, as a faulty memory does."""
    parameter.data.view(-1).view(torch.int16 if parameter.element_size() == 2 else torch.int32)[5] ^= 1


def findings(world: World, faulty: list[int], dtype: str) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).to(getattr(torch, dtype))
    assert dist.group.WORLD is not None
    check_replicas(model, dist.group.WORLD, 1)
    if world.rank in faulty:
        flip_a_bit(model[1].weight)
    try:
        check_replicas(model, dist.group.WORLD, 2)
    except ToolkitError as error:
        return [error.message.replace(world.host, "HOST")]
    return []


@pytest.mark.parametrize(
    ("ranks", "faulty", "dtype", "named"),
    [
        (3, [1], "float32", "rank 1 on HOST"),
        (3, [0], "bfloat16", "rank 0 on HOST"),
        (2, [1], "float32", "rank 0 on HOST, rank 1 on HOST"),
    ],
)
def test_one_flipped_bit_names_the_rank(tmp_path, ranks, faulty, dtype, named):
    found = results_of(findings, ranks, tmp_path / "run", faulty, dtype)
    assert found == [[f"replicas differ after step 2: 1.weight on {named}"]] * ranks


def test_ranks_with_other_experts_are_no_replicas(tmp_path):
    layout = parity.Layout("cp x ep", 2, {"cp": 2, "ep": 2, "context": "ring"}, {"layers": 1}, has_experts=True)
    parity.run(layout, tmp_path / "run", steps=1, check_replicas_every=1)
    assert "no replicas to compare" in said_by(tmp_path / "run", 0)


def test_equal_replicas_pass(tmp_path):
    assert results_of(findings, 2, tmp_path / "run", [], "float32") == [[], []]


def train_with_a_fault(world: World, config: Any) -> None:
    from toolkit.train.loop.step import OptimizerStep

    take = OptimizerStep.take

    def faulty(self: OptimizerStep, *given: Any, **named: Any) -> Any:
        stepped = take(self, *given, **named)
        if world.rank == 3 and named["step"] == 2:
            first = next(self.model.module.parameters())
            flip_a_bit(first.to_local() if hasattr(first, "to_local") else first)
        return stepped

    OptimizerStep.take = faulty  # type: ignore[method-assign]
    parity.train(world, config)


@pytest.mark.parametrize(
    ("name", "ranks"),
    sampled(
        [("replicate 4", "rank 3"), ("replicate 2 x shard 2 zero 3", "rank 1 .*, rank 3")],
        lambda case: "x" not in case[0],
    ),
)
def test_a_run_ends_where_its_replicas_part(tmp_path, name, ranks):
    layout = parity.LAYOUTS[name]
    config = parity.job_of(layout, steps=4, check_replicas_every=2)
    with pytest.raises(AssertionError, match="exit codes of the ranks"):
        launch(train_with_a_fault, layout.ranks, tmp_path / "run", config)
    for rank in range(layout.ranks):
        assert re.search(
            f"replicas differ after step 2: token_embedding.weight on {ranks}", said_by(tmp_path / "run", rank)
        )
    assert "Fix: test the memory" in said_by(tmp_path / "run", 0)

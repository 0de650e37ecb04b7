"""The shipped training job on nodes of a real Slurm: what several nodes make different."""

from __future__ import annotations

import pytest
from on_slurm import Site
from sampling import sampled

from toolkit.metrics.training import read_train_log

pytestmark = pytest.mark.cluster

SMALL = (
    "train.steps=4", "train.batch=8", "train.micro_batch=2", "args.layers=2", "args.width=32", "args.heads=2",
    "args.context=16", "args.max_bytes=100000", "args.dropout=0",
)  # fmt: skip


@pytest.mark.parametrize(
    "reductions", sampled([["hierarchical"], ["hierarchical", "flat"]], lambda case: len(case[0]) == 1), ids="-".join
)
def test_a_model_sharded_over_nodes_trains_alike_in_one_tier_and_in_two(here: Site, reductions: list[str]) -> None:
    losses = []
    for reduction in reductions:
        settings = [
            word for one in (*SMALL, "parallel.shard=4", f"parallel.reduction={reduction}") for word in ("--set", one)
        ]
        _, run = here.submit("train_lm", "-N", 2, "--ntasks-per-node", 2, *settings)
        assert here.wait(run).returncode == 0, here.ok("logs", run.run_id, "--rank", "all")
        assert f"sharding collectives: {reduction}" in here.ok("logs", run.run_id, "--rank", 0)
        losses.append([record.loss for record in read_train_log(run.path / "metrics" / "train.jsonl")])
    assert [len(one) for one in losses] == [4] * len(reductions)
    assert all(one == pytest.approx(losses[0], rel=1e-5) for one in losses)

"""Pipelines that no schedule could run are refused at submit, with the numbers and the nearest that works."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.config.checks import check_request
from toolkit.config.document import Flag
from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.config.shipped import shipped_jobs
from toolkit.config.train import ParallelTable, no_micro_batches
from toolkit.errors import ToolkitError
from toolkit.site.load import load_site


def job(ranks: int, **keys: Any) -> ResolvedJob:
    """The shipped job with `parallel` and `train` keys, by their own names."""
    given = {"job.ranks_per_node": ranks}
    for name, value in keys.items():
        given[f"{'train' if name in ('batch', 'micro_batch') else 'parallel'}.{name}"] = value
    flags = {name: Flag(value, "test") for name, value in given.items()}
    return resolve_job(shipped_jobs()["train_lm"], site=load_site("local"), environ={}, flags=flags)


@pytest.mark.parametrize(
    ("ranks", "keys", "message"),
    [
        (
            4,
            {"pp": 4, "batch": 6, "micro_batch": 2},
            "train.micro_batch: 3 micro-batches per step: a pipeline of 4 ranks requires at least 4 "
            "(6 samples per data rank, 1 data rank, micro_batch = 2). Fix: set micro_batch = 1",
        ),
        (
            4,
            {"pp": 2, "batch": 8, "micro_batch": 0},
            "1 micro-batch per step: a pipeline of 2 ranks requires at least 2 "
            "(4 samples per data rank, 2 data ranks, micro_batch = 0: all samples at once). Fix: set micro_batch = 2",
        ),
        (
            2,
            {"pp": 2, "schedule": "interleaved", "batch": 10, "micro_batch": 2},
            "5 micro-batches per step are not divisible by 2 rounds (2 ranks, schedule",
        ),
        (
            2,
            {"pp": 2, "schedule": "zero_bubble", "batch": 7, "micro_batch": 1},
            'schedule "zero_bubble") (7 samples per data rank, 1 data rank, micro_batch = 1). Fix: set batch = 6 and micro_batch = 1',
        ),
        (
            2,
            {"pp": 2, "stages_per_rank": 2},
            'parallel.stages_per_rank: 2 stages per rank, but schedule "1f1b" supports only one. '
            'Fix: set schedule = "interleaved", or stages_per_rank = 1',
        ),
        (
            4,
            {"pp": 2, "shard": 2, "schedule": "zero_bubble"},
            "it delays weight gradients until after the weights that are sharded over 2 ranks have been released. Fix: set zero = 1",
        ),
        (
            4,
            {"shard": 2, "batch": 6, "micro_batch": 1},
            "train.batch: ranks that share a model require equal numbers of micro-batches, but 4 data ranks have 1 or 2 samples of a batch "
            "of 6 in micro-batches of 1. Fix: set train.batch = 8",
        ),
    ],
)
def test_an_impossible_pipeline_is_refused(ranks, keys, message):
    with pytest.raises(ToolkitError) as refused:
        check_request(job(ranks, **keys), load_site("local"))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (4, {"pp": 4, "batch": 8, "micro_batch": 2}),
        (4, {"pp": 2, "schedule": "interleaved", "batch": 16, "micro_batch": 2}),
        (4, {"pp": 2, "shard": 2, "zero": 1, "schedule": "zero_bubble"}),
    ],
)
def test_a_pipeline_that_fits_is_taken(ranks, keys):
    check_request(job(ranks, **keys), load_site("local"))


def test_an_interleaved_pipeline_has_two_stages_a_rank_unless_it_is_told():
    assert job(2, pp=2, schedule="interleaved").parallel.stages_per_rank == 2
    assert job(2, pp=2, schedule="interleaved", stages_per_rank=1).parallel.stages_per_rank == 1
    assert job(2, pp=2).parallel.stages_per_rank == 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_torch_takes_the_numbers_of_micro_batches_that_are_let_pass(schedule):
    """And, but for fewer than ranks, no others."""
    from toolkit.parallel import pipeline_passes

    class Stage:
        is_first = is_last = False
        group_rank, submod = 0, None

        def __init__(self, ranks: int, each: int) -> None:
            self.group_size, self.num_stages, self.stage_index = ranks, ranks * each, 0

    several = schedule in pipeline_passes.SEVERAL_STAGES
    made = (pipeline_passes._OF_SEVERAL if several else pipeline_passes._OF_ONE_STAGE)[schedule]
    for ranks in (2, 3, 4):
        for number in range(ranks, 14):
            stages = [Stage(ranks, 2), Stage(ranks, 2)] if several else Stage(ranks, 1)
            try:
                made(stages, number)
                taken = True
            except ValueError:
                taken = False
            said = no_micro_batches(ParallelTable(pp=ranks, schedule=schedule), number)
            assert taken == (said == ""), (ranks, number, said)

"""A pipeline trains as one process does: losses, norms and parameters, for every schedule, alone and with shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pipeline_training
import pytest
from real_ranks import run_ranks
from sampling import sampled

from toolkit.parallel import distribute, pipeline_passes
from toolkit.world.facts import World

# Sums in another order: some units in the last place of a loss of 6, a norm, a parameter of size 1, over two steps. AdamW
# divides by the size of gradients, and some are next to nothing. A wrong step is off by as much as the rate, 0.01.
BOUND = 1e-5
BOUND_BF16 = 1e-3  # rounded to 8 bits after sums in another order; two copies without a pipeline are as far off

CLIPPED = {"clip_norm": 0.05}  # a tenth of the norms
ON_2 = [
    ({"schedule": "gpipe"}, {}, {}),
    ({"schedule": "1f1b"}, CLIPPED, {}),
    ({"schedule": "1f1b", "balance": "measured"}, {"micro_batch": 2}, {"tied": False}),
    ({"schedule": "1f1b", "balance": "parameters"}, {"precision": "bf16"}, {}),
    ({"schedule": "interleaved"}, CLIPPED, {}),
    ({"schedule": "zero_bubble"}, {}, {}),
    ({"schedule": "zero_bubble", "stages_per_rank": 2}, {}, {}),
]
ON_4 = [
    ({"pp": 4, "schedule": "1f1b"}, {}, {}),
    ({"pp": 4, "schedule": "zero_bubble"}, CLIPPED, {}),
    ({"replicate": 2, "schedule": "1f1b"}, CLIPPED, {}),
    ({"shard": 2, "zero": 1, "schedule": "1f1b"}, CLIPPED, {}),
    ({"shard": 2, "zero": 1, "schedule": "zero_bubble"}, {}, {}),
    ({"shard": 2, "zero": 2, "schedule": "gpipe"}, {}, {}),
    ({"shard": 2, "zero": 3, "schedule": "1f1b"}, {"precision": "bf16"}, {}),
]


# One product whose stages each have several parts; `make evidence` trains the others.
SAMPLE_ON_4 = [({"shard": 2, "zero": 3, "schedule": "interleaved"}, CLIPPED, {})]


def named(case: tuple[dict[str, Any], ...]) -> str:
    return "-".join(f"{key}={value}" for table in case for key, value in table.items())


def reference_of(folder: Path, case: tuple[dict[str, Any], ...]) -> Path:
    return folder / f"{json.dumps(case[1:], sort_keys=True)}.pt"


def on_one_process(folder: Path, world: World) -> list[Any]:
    for case in [*ON_2, *SAMPLE_ON_4, *ON_4]:
        if not reference_of(folder, case).exists():
            pipeline_training.compared(world, pipeline_training.job({}, *case[1:]), reference_of(folder, case))
    return []


def on_stages(folder: Path, world: World, cases: list[Any]) -> list[Any]:
    return [
        pipeline_training.compared(
            world,
            pipeline_training.job({"ranks": world.size, "pp": 2} | case[0], *case[1:]),
            reference_of(folder, case),
        )
        for case in cases
    ]


def on_2_ranks(folder: Path, world: World) -> list[Any]:
    return on_stages(folder, world, ON_2)


def sample_on_4_ranks(folder: Path, world: World) -> list[Any]:
    return on_stages(folder, world, SAMPLE_ON_4)


def on_4_ranks(folder: Path, world: World) -> list[Any]:
    return on_stages(folder, world, ON_4)


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("references")
    run_ranks(1, on_one_process, folder)
    return folder


@pytest.fixture(scope="module")
def on_2(references) -> list[list[Any]]:
    return run_ranks(2, on_2_ranks, references)


@pytest.fixture(scope="module")
def on_4(references) -> list[list[Any]]:
    return run_ranks(4, on_4_ranks, references)


def assert_as_one_process(answers: list[dict[str, Any]], case: Any) -> None:
    bound = BOUND_BF16 if case[1].get("precision") == "bf16" else BOUND
    for answer in answers:
        assert max(answer["loss"], answer["norm"], answer["parameter"]) <= bound
        assert answer["schedules"] == 1, "stages agree on shapes in the first step alone"
        assert answer["losses"] == answers[0]["losses"] and answer["norms"] == answers[0]["norms"]
    held: dict[str, set[str]] = {}
    for answer in answers:
        for name, digest in answer["digests"].items():
            held.setdefault(name, set()).add(digest)
    assert all(len(digests) == 1 for digests in held.values()), "ranks differ in what they all hold"
    assert {f"blocks.{number}.attention_out.weight" for number in range(4)} | {"head.weight"} <= held.keys()
    if case[2].get("tied", True):
        assert held["head.weight"] == held["token_embedding.weight"]


@pytest.mark.parametrize("number", range(len(ON_2)), ids=[named(case) for case in ON_2])
def test_two_stages_train_as_one_process(on_2, number):
    assert_as_one_process([of_rank[number] for of_rank in on_2], ON_2[number])


def test_stages_of_shards_train_as_one_process(references):
    answers = run_ranks(4, sample_on_4_ranks, references)
    assert_as_one_process([of_rank[0] for of_rank in answers], SAMPLE_ON_4[0])


@pytest.mark.evidence
@pytest.mark.parametrize("number", range(len(ON_4)), ids=[named(case) for case in ON_4])
def test_four_ranks_train_as_one_process(on_4, number):
    assert_as_one_process([of_rank[number] for of_rank in on_4], ON_4[number])


def test_each_rank_holds_its_own_blocks_alone(on_2):
    blocks = [{int(name.split(".")[1]) for name in of_rank[0]["digests"] if "blocks" in name} for of_rank in on_2]
    assert blocks == [{0, 1}, {2, 3}]
    interleaved = [{int(name.split(".")[1]) for name in of_rank[4]["digests"] if "blocks" in name} for of_rank in on_2]
    assert interleaved == [{0, 2}, {1, 3}]


def with_tied_gradients_apart(folder: Path, world: World) -> list[Any]:
    pipeline_passes.PipelinePasses._sum_ties = lambda passes: None
    return on_stages(folder, world, [ON_2[0]])


def with_a_norm_of_one_stage(folder: Path, world: World) -> list[Any]:
    clip = distribute.clip_gradients
    distribute.clip_gradients = lambda parameters, norm, _, elsewhere: clip(parameters, norm, None, elsewhere)
    return on_stages(folder, world, [ON_2[1]])


def with_tied_gradients_counted_twice(folder: Path, world: World) -> list[Any]:
    clip = distribute.clip_gradients
    distribute.clip_gradients = lambda parameters, norm, stages, _: clip(parameters, norm, stages)
    return on_stages(folder, world, [ON_2[1]])


def with_one_micro_batch_lost(folder: Path, world: World) -> list[Any]:
    loss = pipeline_passes.PipelinePasses._loss
    calls = iter(range(1000))
    pipeline_passes.PipelinePasses._loss = lambda *given: loss(*given) * (next(calls) != 3)
    return on_stages(folder, world, [ON_2[0]])


MISTAKES = (
    with_tied_gradients_apart,
    with_a_norm_of_one_stage,
    with_tied_gradients_counted_twice,
    with_one_micro_batch_lost,
)


@pytest.mark.parametrize("mistake", sampled(MISTAKES, lambda case: case[0] is with_tied_gradients_counted_twice))
def test_a_mistake_exceeds_the_bound(references, mistake):
    answers = run_ranks(2, mistake, references)
    assert max(max(of_rank[0]["norm"], of_rank[0]["parameter"]) for of_rank in answers) > 100 * BOUND

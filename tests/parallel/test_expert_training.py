"""train_moe trains on ranks that share experts as one process does; its experts move, and a run resumes at another `ep`."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import parity
import pytest
from launch import launch, said_by
from parity import Layout
from sampling import sampled

from toolkit.errors import ToolkitError
from toolkit.metrics.step_profile import read_profile

EP = {"shard": 2, "ep": 2}
STEPS = parity.SAMPLED_STEPS


def layout(ranks: int, parallel: dict[str, object], **args: object) -> Layout:
    return Layout("experts", ranks, dict(parallel), {"layers": 2, **args}, has_experts=True)


def run(folder: Path, ranks: int, parallel: dict[str, object], args: dict[str, object] | None = None, **train: object):
    return parity.run(layout(ranks, parallel, **(args or {})), folder, **{"steps": STEPS} | train)


GATED = {"shared_hidden": 32, "score": "sigmoid", "expert_groups": 4, "groups_per_token": 2, "bias_rate": 1e-3}


@pytest.mark.parametrize(
    ("ranks", "parallel", "args", "train"),
    sampled(
        [
            (2, EP, {}, {"clip_norm": 0.05}),
            (4, {"shard": 4, "ep": 2}, GATED, {}),
            (4, {"shard": 4, "ep": 4, "zero": 1}, {}, {}),
            (4, {"cp": 2, "ep": 2, "context": "ring"}, {}, {}),
            (4, {"shard": 2, "ep": 2, "tp": 2}, GATED, {}),
            (4, {"shard": 2, "ep": 2, "pp": 2}, {"capacity": 8.0}, {}),
            (4, {"cp": 2, "ep": 2, "pp": 2}, {}, {}),
            (2, EP | {"wrap": "size", "wrap_parameters": 1000, "buffer_type": "bf16"}, {}, {}),
            (2, EP, {}, {"compile": True}),
            (2, EP, {}, {"offload": ["gradients"]}),
            (2, EP, {}, {"recompute": "every"}),
            (2, EP, {}, {"recompute": "selective"}),
            (2, EP, {}, {"recompute": "budget", "activation_budget_gb": 0.0005}),
        ],
        lambda case: case[3] == {"clip_norm": 0.05} or case[1].get("pp") == case[1].get("cp") == 2,
    ),
)
def test_ranks_that_share_experts_train_as_one_process(tmp_path, ranks, parallel, args, train):
    found = run(tmp_path / "ranks", ranks, parallel, args, **train)
    alone = run(tmp_path / "alone", 1, {}, args, **{k: v for k, v in train.items() if k == "clip_norm"})
    assert parity.difference(found, alone, STEPS).largest <= parity.BOUND


# All products of three dimensions on 8 ranks; experts are split where shard x cp allows it.
PRODUCTS = [
    {name: 2 for name in names if name != "replicate"} | ({"ep": 2} if {"shard", "cp"} & {*names} else {})
    for names in combinations(("pp", "replicate", "shard", "cp", "tp"), 3)
]


@pytest.mark.evidence
@pytest.mark.timeout(900)
@pytest.mark.parametrize("parallel", PRODUCTS, ids=lambda sizes: " x ".join(sizes))
def test_products_of_three_dimensions_train_as_one_process(tmp_path, parallel):
    given = parallel | ({"context": "ring"} if "cp" in parallel else {})
    found = run(tmp_path / "ranks", 8, given, steps=20)
    alone = run(tmp_path / "alone", 1, {}, steps=20)
    assert parity.difference(found, alone, 20).loss <= parity.BOUND


def test_a_profile_names_the_waits_of_experts_and_of_the_ring(tmp_path):
    run(tmp_path, 2, {"cp": 2, "ep": 2, "context": "ring"}, steps=5, profile_from=2, profile_steps=3)
    profile = read_profile(tmp_path / "metrics" / "profile.json")
    named = {phase.name: phase.mean_s for phase in profile.phases}
    assert named["all_to_all"] > 0 and named["ring"] > 0
    assert sum(named.values()) == pytest.approx(profile.step.mean_s)
    assert profile.work.max <= profile.step.mean_s - named["all_to_all"], "waits are no work"


MIGRATION = {"expert_migration": 1.01, "expert_check_every": 1, "expert_checks": 1, "expert_cooldown": 0}


def test_moved_experts_change_nothing_and_a_run_resumes_at_another_ep(tmp_path):
    """Without clipping: the norm of the gradient sums experts in the order of their places."""
    settled = run(tmp_path / "settled", 2, EP, average_decay=0.5)
    moved = run(tmp_path / "moved", 2, EP | MIGRATION, average_decay=0.5, steps=2)
    assert "experts moved; the busiest rank has" in said_by(moved, 0)
    records = [
        [json.loads(line) for line in (folder / "metrics" / "train.jsonl").open()] for folder in (settled, moved)
    ]
    assert [record["loss_hex"] for record in records[0][:2]] == [record["loss_hex"] for record in records[1]]
    with parity.stored(moved, 2) as checkpoint:
        places = {
            key: checkpoint.read(key).tolist() for key in checkpoint.manifest.tensors if key.endswith("balance.places")
        }
    of_model = {key: value for key, value in places.items() if key.startswith("model.")}
    of_average = {key: value for key, value in places.items() if key not in of_model}
    assert list(of_average.values()) == list(of_model.values()) != [sorted(one) for one in of_model.values()]
    parity.run(layout(4, {"shard": 4, "ep": 4} | MIGRATION), moved, attempt=1, steps=STEPS, average_decay=0.5)
    losses = [json.loads(line)["loss"] for line in (moved / "metrics" / "train.jsonl").open()]
    assert losses == pytest.approx([record["loss"] for record in records[0]], rel=parity.BOUND)


@pytest.mark.parametrize(
    ("ranks", "parallel", "args", "message"),
    [
        (2, {"shard": 2, "ep": 2}, {"experts": 7}, "expected a number of experts divisible by ep = 2, got 7. Fix: use 8 experts"),
        (2, {"pp": 2, "schedule": "zero_bubble"}, {}, "zero_bubble computes the gradients of weights in passes of their own"),
        (2, {"tp": 2, "sequence": True}, {}, "the ranks of tp have different tokens with parallel.sequence"),
    ],
)  # fmt: skip
def test_layouts_that_experts_do_not_support_are_refused(tmp_path, ranks, parallel, args, message):
    with pytest.raises((AssertionError, ToolkitError), match=message):
        run(tmp_path, ranks, parallel, args, steps=1)


def _overflow_at_first(world, config):
    from toolkit.train import trainer
    from toolkit.train.optim.precision import gradient_scaler

    trainer.gradient_scaler = lambda *given: gradient_scaler(*given, first_scale=2.0**30)
    parity.train(world, config)


def test_a_step_that_overflows_changes_no_shares_and_no_bias(tmp_path):
    fp16 = parity.job_of(layout(1, {}, bias_rate=1e-3), steps=1, precision="fp16")
    launch(_overflow_at_first, 1, tmp_path, fp16)
    with parity.stored(tmp_path, 1) as checkpoint:
        shares = {key: checkpoint.read(key) for key in checkpoint.manifest.tensors if key.endswith("balance.shares")}
        biases = {key: checkpoint.read(key) for key in checkpoint.manifest.tensors if key.endswith("router.bias")}
    assert all((one == 1 / 8).all() for one in shares.values()) and shares
    assert not any(one.any() for one in biases.values()) and biases


def test_one_rank_trains_on_with_a_migration_that_has_no_effect(tmp_path):
    run(tmp_path, 1, {"expert_migration": 1.3}, steps=1)
    assert "no experts move (parallel.expert_migration): each rank has all of them (parallel.ep = 1)" in said_by(
        tmp_path, 0
    )


def test_a_dense_model_has_no_experts_to_split(tmp_path):
    with pytest.raises(AssertionError, match="ep = 2 splits experts, but GPT has no module MoE"):
        parity.run(Layout("dense", 2, EP), tmp_path, steps=1)

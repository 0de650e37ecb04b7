"""The shipped job with compressed gradients: it trains, saves and resumes to the last bit; a skipped step keeps no residual."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch, said_by
from parity import BOUND, Layout, difference, job_of, train
from sampling import sampled

from toolkit.checkpoint.contents.stored_tensors import StoredTensors
from toolkit.checkpoint.format.manifest_file import read_manifest

SGD = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.1}


@dataclass(frozen=True)
class Compressed:
    table: dict[str, Any]
    train: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)


def job(one: Compressed, ranks: int = 2, **train: Any):
    settings = {"steps": 4, "check_replicas_every": 1} | one.train | train
    config = job_of(Layout("compressed", ranks, one.parallel), **settings)
    compression = config.gradient_compression.model_validate({"min_elements": 512} | one.table)
    saves = config.checkpoint.model_copy(update={"every_steps": 1})
    return config.model_copy(update={"gradient_compression": compression, "checkpoint": saves})


def run(one: Compressed, folder: Path, ranks: int = 2, attempt: int = 0, **train_settings: Any) -> Path:
    launch(train, ranks, folder, job(one, ranks, **train_settings), attempt=attempt)
    return folder


def residuals(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The mean residuals in a checkpoint."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    with StoredTensors(path, read_manifest(path)) as stored:
        names = [name for name in stored.manifest.tensors if name.startswith("gradient_compression.mean.")]
        return {name: torch.as_tensor(stored.read(name)) for name in names}


RESUMED = {
    "int8": Compressed({"algorithm": "int8"}),
    "stochastic": Compressed({"algorithm": "int4", "rounding": "stochastic", "dense_steps": 1}),
    "top_k": Compressed({"algorithm": "top_k", "momentum": 0.5, "residual_saved": "exact"}, SGD),
    "ef_sign": Compressed({"algorithm": "ef_sign", "residual_saved": "exact", "residual_type": "bf16"}, SGD),
    "powersgd": Compressed({"algorithm": "powersgd", "rank": 2, "residual_saved": "exact"}),
    "ef21": Compressed({"algorithm": "ef21", "density": 0.1, "residual_saved": "exact"}, SGD),
}


@pytest.mark.parametrize(
    "name",
    [
        "int8",
        "top_k",
        *(pytest.param(name, marks=pytest.mark.evidence) for name in RESUMED if name not in ("int8", "top_k")),
    ],
)
def test_a_resumed_run_repeats_every_bit(tmp_path, name):
    one = RESUMED[name]
    whole, parts = run(one, tmp_path / "whole"), tmp_path / "parts"
    run(one, parts, steps=2)
    run(one, parts, attempt=1)
    assert "resumed at step 2" in said_by(parts, 0, attempt=1)
    assert difference(parts, whole, steps=4).largest == 0


def test_int8_trains_as_dense_gradients_do(tmp_path):
    """A loss that differs by less than 0.1 % after the first steps; buckets of 0.02 MiB give every layer its own."""
    dense = run(Compressed({"algorithm": "none"}), tmp_path / "dense", steps=8)
    config = job(Compressed({"algorithm": "int8"}), steps=8)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"bucket_mb": 0.02})})
    launch(train, 2, tmp_path / "int8", config)
    assert 0 < difference(tmp_path / "int8", dense, steps=8).loss < 1e-3


def test_other_numbers_of_ranks_continue_with_the_mean_residual(tmp_path):
    exact = Compressed({"algorithm": "top_k", "density": 0.05, "residual_saved": "exact"}, SGD)
    run(exact, tmp_path, ranks=4, steps=2)
    before = residuals(tmp_path, 2)
    assert any(tensor.any() for tensor in before.values())
    run(exact, tmp_path, attempt=1, steps=3)
    assert "; each rank continues with the mean residual of 4 ranks" in said_by(tmp_path, 0, attempt=1)
    before = residuals(tmp_path, 3)
    run(exact, tmp_path, ranks=1, attempt=2, steps=4, check_replicas_every=0)
    log, kept = said_by(tmp_path, 0, attempt=2), residuals(tmp_path, 4)
    assert "gradient reduction: none, because a single rank sends no gradients" in log
    assert "; the mean residual of 2 ranks is kept for a start on more ranks" in log
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept.items()) and kept.keys() == before.keys()
    run(Compressed({"algorithm": "int8"}, SGD), tmp_path, attempt=3, steps=5)
    assert "; gradient compression drops residual of the checkpoint" in said_by(tmp_path, 0, attempt=3)
    run(Compressed({"algorithm": "none"}, SGD), tmp_path, ranks=1, attempt=4, steps=6, check_replicas_every=0)
    assert "not restored from the checkpoint: gradient_compression" in said_by(tmp_path, 0, attempt=4)


def _skip_step_two(world, config) -> None:
    from toolkit.train.guard import GO_ON, LossGuard, StepDecision

    LossGuard.judge = lambda self, step, *given: StepDecision("skip", "skipped") if step == 2 else GO_ON
    train(world, config)


def _skip_step_three(world, config) -> None:
    from toolkit.train.guard import GO_ON, LossGuard, StepDecision

    LossGuard.judge = lambda self, step, *given: StepDecision("skip", "skipped") if step == 3 else GO_ON
    train(world, config)


def _overflow_at_first(world, config) -> None:
    from toolkit.train import trainer
    from toolkit.train.optim.precision import gradient_scaler

    trainer.gradient_scaler = lambda *given: gradient_scaler(*given, first_scale=2.0**22)
    train(world, config)


def test_a_skipped_step_leaves_the_residual_unchanged(tmp_path):
    one = Compressed({"algorithm": "top_k"}, SGD | {"guard": "skip"})
    launch(_skip_step_two, 2, tmp_path, job(one, steps=3))
    first, second, third = (residuals(tmp_path, step) for step in (1, 2, 3))
    assert first and all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], third[name]) for name in first)


def test_an_overflow_of_fp16_leaves_the_residual_unchanged_and_later_ones_are_unscaled(tmp_path):
    one = Compressed({"algorithm": "top_k"}, SGD | {"precision": "fp16", "steps": 9})
    launch(_overflow_at_first, 2, tmp_path / "fp16", job(one))
    skipped = residuals(tmp_path / "fp16", 1)
    assert skipped and not any(tensor.any() for tensor in skipped.values())
    run(Compressed(one.table, SGD | {"steps": 2}), tmp_path / "fp32")
    ours, theirs = residuals(tmp_path / "fp16", 9), residuals(tmp_path / "fp32", 2)
    norms = [sum(float(one.square().sum()) for one in found.values()) ** 0.5 for found in (ours, theirs)]
    assert 0.1 < norms[0] / norms[1] < 30, "not the scale of the loss"


def test_harmful_combinations_are_reported(tmp_path):
    log = said_by(run(Compressed({"algorithm": "top_k"}), tmp_path, steps=1), 0)
    assert "gradient compression: bursts of error feedback disturb adamw" in log
    assert "gradient compression: about 100 steps pass until a gradient is sent, but the run has only 1" in log


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicate x shard": (4, {"shard": 2}),
    "replicate x shard zero 1": (4, {"shard": 2, "zero": 1}),
    "replicate x tp": (4, {"tp": 2}),
    "replicate x pp": (4, {"pp": 2}),
    "replicate x shard x pp": (8, {"shard": 2, "pp": 2}),
    "replicate x tp x pp": (8, {"tp": 2, "pp": 2, "sequence": True}),
    "replicate 3 x shard": (6, {"shard": 2}),
}


@pytest.mark.parametrize("layout", sampled(list(LAYOUTS), lambda name: name == "replicate x shard"))
def test_copies_of_parts_average_gradients_and_resume_to_the_last_bit(tmp_path, layout):
    """With dense messages, they train as one process; with residuals, every bit repeats after a resume."""
    ranks, parallel = LAYOUTS[layout]
    dense = Compressed({"algorithm": "int8", "min_elements": 10**6}, parallel=parallel)
    alone = run(Compressed({"algorithm": "none"}), tmp_path / "alone", ranks=1, check_replicas_every=0)
    assert difference(run(dense, tmp_path / "dense", ranks), alone, steps=4).largest <= BOUND
    few_bits = Compressed({"algorithm": "int8"}, parallel=parallel)
    assert 1e-7 < difference(run(few_bits, tmp_path / "int8", ranks), alone, steps=4).loss < 1e-3
    table = {"algorithm": "int4", "error_feedback": "on", "rounding": "stochastic", "residual_saved": "exact"}
    one, parts = Compressed(table, SGD, parallel), tmp_path / "parts"
    whole = run(one, tmp_path / "whole", ranks)
    run(one, parts, ranks, steps=2)
    run(one, parts, ranks, attempt=1)
    assert any(tensor.any() for tensor in residuals(parts, 2).values())
    assert difference(parts, whole, steps=4).largest == 0
    assert "after the backward passes" in said_by(parts, 0)


@pytest.mark.parametrize("zero", sampled([3, 1], lambda zero: zero == 3))
def test_shards_receive_compressed_gradients(tmp_path, zero):
    alone = run(Compressed({"algorithm": "none"}), tmp_path / "alone", ranks=1, check_replicas_every=0)
    for algorithm, bound in (("int8", 1e-3), ("bf16", 1e-4)):
        one = Compressed({"algorithm": algorithm}, {"check_replicas_every": 0}, {"shard": 2, "zero": zero})
        found = difference(run(one, tmp_path / algorithm), alone, steps=4)
        assert 0 < found.loss < bound
    assert "int8 in the reduce-scatter: 25.4% of the bytes of dense gradients" in said_by(tmp_path / "int8", 0)


def test_residuals_of_shards_continue_in_another_layout(tmp_path):
    table = {"algorithm": "top_k", "density": 0.05}
    run(Compressed(table, SGD, {"shard": 2}), tmp_path, ranks=4, steps=2)
    before = residuals(tmp_path, 2)
    launch(_skip_step_three, 2, tmp_path, job(Compressed(table, SGD | {"guard": "skip"}), 2, steps=3), attempt=1)
    after = residuals(tmp_path, 3)
    assert before and all(torch.allclose(before[name], after[name], atol=1e-7) for name in before)


def test_a_resume_of_shards_repeats_random_rounding(tmp_path):
    one = Compressed({"algorithm": "qsgd"}, {"check_replicas_every": 0}, {"shard": 2})
    whole, parts = run(one, tmp_path / "whole", steps=3), tmp_path / "parts"
    run(one, parts, steps=2)
    run(one, parts, attempt=1, steps=3)
    assert difference(parts, whole, steps=3).largest == 0

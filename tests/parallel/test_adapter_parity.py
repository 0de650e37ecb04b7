"""Adapters on every layout train as those of one process do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import launch
from parity import BOUND, LAYOUTS, SAMPLED_CUT, SAMPLED_STEPS, Layout, difference, job_of, train

from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.config.resolved import ResolvedJob

RANK = {"rank": 4, "alpha": 8.0, "dropout": 0.0}
QUANTISED = RANK | {"quantize": "nf4", "double_quantization": True}
WHOLE = RANK | {"rank_stabilized": True, "targets": ["attention_out", "perceptron_*"], "modules_to_save": ["norm"]}


def adapted(layout: Layout, adapters: dict[str, Any], **settings: Any) -> ResolvedJob:
    job = job_of(layout, **{"steps": SAMPLED_STEPS} | settings)
    return job.model_copy(update={"adapters": job.adapters.model_copy(update=adapters)})


def run(layout: Layout, run_dir: Path, adapters: dict[str, Any], attempt: int = 0, **settings: Any) -> Path:
    launch(train, layout.ranks, run_dir, adapted(layout, adapters, **settings), attempt=attempt, timeout_s=240)
    return run_dir


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    """The run of one process, made once for each table [adapters]."""
    folder = tmp_path_factory.mktemp("alone")
    made: dict[str, Path] = {}

    def run_alone(adapters: dict[str, Any], **settings: Any) -> Path:
        key = repr((adapters, settings))
        if key not in made:
            made[key] = run(Layout("alone", 1), folder / str(len(made)), adapters, **settings)
        return made[key]

    return run_alone


def keys_of(run_dir: Path) -> set[str]:
    manifest = read_manifest(run_dir / "checkpoints" / f"step-{SAMPLED_STEPS:08d}")
    return {key for key in manifest.tensors if key.startswith("model.")}


def test_sharded_adapters_train_as_one_process_does_and_checkpoints_lack_the_base(alone, tmp_path):
    found = run(LAYOUTS["shard 2 zero 3"], tmp_path / "run", WHOLE)
    assert difference(found, alone(WHOLE), SAMPLED_STEPS).largest <= BOUND
    layers = [
        f"blocks.{number}.{name}"
        for number in range(4)
        for name in ("attention_out", "perceptron_in", "perceptron_out")
    ]
    adapters = {f"model.{name}.lora_{end}" for name in layers for end in "AB"}
    assert keys_of(found) == adapters | {"model.norm.weight", "model.norm.bias"}


@pytest.mark.evidence
def test_a_run_with_adapters_resumes_on_another_layout(alone, tmp_path):
    run(LAYOUTS["tp 2, sequence"], tmp_path / "run", WHOLE, steps=SAMPLED_CUT)
    run(LAYOUTS["replicate 2"], tmp_path / "run", WHOLE, attempt=1)
    assert difference(tmp_path / "run", alone(WHOLE), SAMPLED_STEPS).largest <= BOUND


def test_a_quantised_base_on_two_replicas_trains_as_one_process_does(alone, tmp_path):
    found = run(LAYOUTS["replicate 2"], tmp_path / "run", QUANTISED)
    assert difference(found, alone(QUANTISED), SAMPLED_STEPS).largest <= BOUND
    assert difference(found, alone(RANK), SAMPLED_STEPS).loss > BOUND, "the base is quantised"


@pytest.mark.evidence
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        *((name, {}) for name in (
            "replicate 2", "shard 2 zero 1", "shard 2 zero 2", "shard 2 zero 3", "tp 2", "tp 2, sequence",
            "replicate 2 x tp 2", "shard 2 zero 3 x tp 2", "pp 2 1f1b", "pp 2 x tp 2, sequence",
        )),
        ("replicate 2", {"recompute": "every"}),
        ("tp 2", {"recompute": "selective"}),
        ("shard 2 zero 3", {"recompute": "every", "compile": True}),
        ("replicate 2", {"optimizer": "muon"}),
    ],
)  # fmt: skip
def test_every_layout_trains_adapters_as_one_process_does(alone, tmp_path, layout, settings):
    wanted = alone(WHOLE, **{name: value for name, value in settings.items() if name == "optimizer"})
    found = difference(run(LAYOUTS[layout], tmp_path / "run", WHOLE, **settings), wanted, SAMPLED_STEPS)
    # Muon orthogonalizes in bfloat16, which magnifies the rounding of sums in the first gradient of B.
    assert (found.loss if "optimizer" in settings else found.largest) <= BOUND


# Of a split weight each rank quantises its part: equal where the blocks of 64 numbers and the rows of int8 are the same.
@pytest.mark.evidence
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("layout", ["tp 2", "pp 2 1f1b", "replicate 2 x tp 2"])
def test_a_split_quantised_base_trains_as_one_process_does(tmp_path, kind, layout):
    targets = ["query_key_value", "perceptron_in"] if kind == "int8" else []
    adapters = RANK | {"quantize": kind, "targets": targets}
    args = {"width": 128}
    one = run(Layout("alone", 1, args=args), tmp_path / "one", adapters)
    split = LAYOUTS[layout]
    found = run(Layout(layout, split.ranks, split.parallel, args), tmp_path / "run", adapters)
    largest = difference(found, one, SAMPLED_STEPS).loss
    assert largest <= (BOUND if kind != "int8" else 1e-3)

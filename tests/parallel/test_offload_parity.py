"""Offloaded state, gradients, parameters and activations: the same losses and weights to the last bit, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity import Layout, difference, run, run_in_two
from sampling import sampled

STEPS, CUT = 3, 2
SIZES = {"width": 128, "context": 64}  # activations and weights that are large enough to be moved
ONE, COPIES = Layout("one", 1, {}, SIZES), Layout("replicate 2", 2, {}, SIZES)
SHARDS = Layout("shard 2 zero 3", 2, {"shard": 2, "zero": 3}, SIZES)
TENSOR, STAGES = Layout("tp 2", 2, {"tp": 2}, SIZES), Layout("pp 2", 2, {"pp": 2}, SIZES)
EVERYTHING = ["optimizer", "gradients", "parameters", "activations"]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run of a layout without offload, once for all tests."""
    found: dict[str, Path] = {}

    def of(layout: Layout) -> Path:
        if layout.name not in found:
            found[layout.name] = run(layout, tmp_path_factory.mktemp("without") / "run", steps=STEPS)
        return found[layout.name]

    return of


@pytest.mark.parametrize(
    ("layout", "offload", "in_a_file"),
    sampled(
        [
            (ONE, EVERYTHING, True),
            (SHARDS, ["optimizer", "gradients", "activations"], True),
            (ONE, EVERYTHING, False),
            (ONE, "gradients", False),
            (ONE, "parameters", True),
            (ONE, "activations", True),
            (SHARDS, "optimizer", False),
            (COPIES, ["optimizer", "activations"], False),
            (COPIES, "optimizer", True),
            (TENSOR, ["optimizer", "activations"], True),
            (STAGES, "optimizer", True),
        ],
        lambda case: case[2] and case[1] in (EVERYTHING, EVERYTHING[:2] + EVERYTHING[3:]),
    ),
    ids=lambda value: value.name if isinstance(value, Layout) else str(value),
)
def test_every_loss_and_weight_is_that_of_a_run_without(tmp_path, without, layout, offload, in_a_file):
    found = run(layout, tmp_path / "run", steps=STEPS, offload=offload, offload_to=str(tmp_path) if in_a_file else "")
    assert difference(found, without(layout), STEPS).largest == 0
    assert not list(tmp_path.glob("offload-*")), "the file has no name that could remain"


@pytest.mark.parametrize("layout", sampled([ONE, SHARDS], lambda case: case[0] is ONE), ids=lambda layout: layout.name)
def test_updates_in_the_backward_pass_are_those_after_it(tmp_path, layout):
    """Of steps with one micro-batch, and without clipping, which needs the gradients of all parameters first."""
    settings = {"steps": STEPS, "micro_batch": 0, "clip_norm": 0.0}
    found = run(layout, tmp_path / "run", **settings, offload=EVERYTHING[:2], offload_to=str(tmp_path))
    assert difference(found, run(layout, tmp_path / "without", **settings), STEPS).largest == 0


def test_a_run_resumes_with_another_tier_and_from_a_layout_without_one(tmp_path, without):
    first = {"steps": STEPS, "offload": EVERYTHING, "offload_to": str(tmp_path)}
    run(ONE, tmp_path / "run", **first | {"steps": CUT})
    run(ONE, tmp_path / "run", attempt=1, steps=STEPS, offload=["optimizer", "gradients"])
    assert difference(tmp_path / "run", without(ONE), STEPS).largest == 0
    mixed = run_in_two(COPIES, ONE, tmp_path / "mixed", CUT, **first | {"offload": "optimizer"})
    assert difference(mixed, without(ONE), STEPS).largest < 2e-5


@pytest.mark.parametrize(
    "settings",
    sampled([{"optimizer": "muon"}, {"optimizer": "sgd"}, {"recompute": "every"}], lambda case: "recompute" in case[0]),
)
def test_with_other_optimizers_and_recomputation(tmp_path, settings):
    offload = EVERYTHING[:3]
    found = run(ONE, tmp_path / "run", steps=STEPS, offload=offload, **settings)
    assert difference(found, run(ONE, tmp_path / "without", steps=STEPS, **settings), STEPS).largest == 0


def test_rounded_activations_change_the_losses_a_little(tmp_path, without):
    found = run(ONE, tmp_path / "run", steps=STEPS, offload="activations", offload_activations_as="bf16")
    changed = difference(found, without(ONE), STEPS)
    assert 0 < changed.loss < 1e-3 and changed.gradient < 1e-2

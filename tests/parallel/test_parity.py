"""Every layout trains as one process does; `make parity` runs them all and writes docs/parity.md."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from parity import (
    BOUND,
    LAYOUTS,
    SAMPLED_CUT,
    SAMPLED_STEPS,
    STEPS,
    VARIANTS,
    Difference,
    Layout,
    bound_of,
    compared_with,
    difference,
    forget,
    job_of,
    run,
    run_in_two,
    train,
    variants_of,
)
from sampling import sampled

from toolkit.errors import ToolkitError

ROOT = Path(__file__).parents[2]
DIFFERENCES = ("loss", "gradient", "parameter")
RESUMED, FROM_ONE, ON_ONE = "resumed", "begun by one process", "ended by one process"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run of one process with a variant's settings, and the model of a layout, made once."""
    folder = tmp_path_factory.mktemp("alone")

    def run_alone(variant: str, steps: int, layout: Layout = LAYOUTS["replicate 2"]) -> Path:
        one = alone_as(layout)
        run_dir = folder / "-".join([variant.replace(" ", "-"), str(steps), str(one.has_experts), *one.args])
        settings = VARIANTS[variant] | {"steps": steps}
        return run_dir if run_dir.exists() else run(one, run_dir, **settings)

    return run_alone


def alone_as(layout: Layout) -> Layout:
    """One process with the model of a layout."""
    return Layout("alone", 1, args=layout.args, has_experts=layout.has_experts)


def sample_of(variant: str) -> dict[str, Any]:
    return VARIANTS[variant] | {"steps": SAMPLED_STEPS}


@pytest.fixture
def distance(alone) -> Callable[..., Difference]:
    """How far a run of the sample is from one process."""
    return lambda found, variant: difference(found, alone(variant, SAMPLED_STEPS), SAMPLED_STEPS)


@pytest.mark.parametrize(
    ("layout", "variant"),
    [
        ("replicate 2", "clipped"),
        ("shard 2 zero 1", "plain"),
        ("shard 3 zero 3", "clipped"),
        ("pp 2 1f1b", "bf16"),
        ("cp 2 ring", "clipped"),
    ],
)
def test_a_layout_trains_as_one_process_does(distance, tmp_path, layout, variant):
    found = distance(run(LAYOUTS[layout], tmp_path / "run", **sample_of(variant)), variant)
    assert found.largest <= bound_of(variant, LAYOUTS[layout]), found


def _traced_alone(world: Any, config: Any) -> None:
    """Blocks are compiled but for the last part, which is C++ and takes a compiler its time."""
    import toolkit.train.trainer as trainer

    compile_blocks = trainer.compile_blocks
    trainer.compile_blocks = lambda model, below, mode: compile_blocks(model, below, backend="aot_eager")
    train(world, config)


def test_compiled_blocks_train_as_plain_ones_do(distance, tmp_path):
    launch(
        _traced_alone, 2, tmp_path / "run", job_of(LAYOUTS["shard 2 zero 3"], **sample_of("compiled")), timeout_s=240
    )
    found = distance(tmp_path / "run", "plain")
    assert found.largest <= BOUND, found


@pytest.mark.parametrize(
    ("first", "then"),
    sampled([("shard 2 zero 3", "replicate 2"), ("replicate 2", "pp 2 x tp 2")], lambda case: "tp" not in case[1]),
)
def test_a_run_goes_on_with_another_strategy(distance, tmp_path, first, then):
    run_in_two(LAYOUTS[first], LAYOUTS[then], tmp_path / "run", SAMPLED_CUT, **sample_of("plain"))
    found = distance(tmp_path / "run", "plain")
    assert found.largest <= BOUND, found


def run_variant(layout: Layout, name: str, run_dir: Path) -> Path:
    if name in VARIANTS:
        return run(layout, run_dir, **VARIANTS[name])
    one = alone_as(layout)
    return run_in_two(one if name == FROM_ONE else layout, one if name == ON_ONE else layout, run_dir)


def _without_the_factor(world: Any, config: Any) -> None:
    from toolkit.parallel.passes import PassesInTurn

    def forgetful(self, micro_batch, part_of, heard, precision):
        inputs, targets = micro_batch
        part = part_of(self.module(inputs), targets)
        heard(part.detach())
        part.backward()

    PassesInTurn._pass = forgetful
    train(world, config)


def _clipped_by_own_norm(world: Any, config: Any) -> None:
    from torch.distributed.tensor import DTensor

    import toolkit.parallel.clipping as clipping

    def own_norm(gradients, stages):
        parts = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
        return torch.stack([part.norm() for part in parts]).norm()

    clipping.total_norm = own_norm
    train(world, config)


def _all_ranks_read_the_same(world: Any, config: Any) -> None:
    import toolkit.train.loop.training_loop as loop

    share = loop.share
    loop.share = lambda first, batch, rank, size: share(first, batch, 0, size)
    train(world, config)


@pytest.mark.parametrize(
    ("bug", "layout"),
    sampled(
        [
            (_without_the_factor, "replicate 2"),
            (_clipped_by_own_norm, "shard 2 zero 3"),
            (_all_ranks_read_the_same, "replicate 2"),
        ],
        lambda case: case[0] is _all_ranks_read_the_same,
    ),
)
def test_a_planted_bug_exceeds_the_bound(distance, tmp_path, bug, layout):
    launch(bug, 2, tmp_path / "run", job_of(LAYOUTS[layout], **sample_of("clipped")), timeout_s=240)
    assert distance(tmp_path / "run", "clipped").largest > 100 * BOUND


@pytest.fixture(scope="module")
def recorded() -> Callable[[list[dict[str, Any]]], None]:
    """Return a function that adds rows to `evidence/parity.json`, which scripts/parity_table.py reads."""
    # First: the checkout may change while this runs.
    version = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    found: dict[str, Any] = {
        "commit": version.stdout.strip(), "torch": torch.__version__, "time": datetime.now(UTC).isoformat(), "rows": [],
    }  # fmt: skip
    (ROOT / "evidence").mkdir(exist_ok=True)

    def record(rows: list[dict[str, Any]]) -> None:
        found["rows"] += rows
        (ROOT / "evidence" / "parity.json").write_text(json.dumps(found, indent=1))

    return record


@pytest.mark.evidence
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_every_layout_trains_as_one_process_does(alone, recorded, tmp_path, layout):
    rows: list[dict[str, Any]] = []
    for name in (*variants_of(layout), RESUMED, FROM_ONE, ON_ONE):
        rows.append({"layout": layout.name, "variant": name, "bound": bound_of(name, layout)})
        run_dir = tmp_path / "run"
        try:
            run_variant(layout, name, run_dir)
            rows[-1] |= vars(difference(run_dir, alone(compared_with(name), STEPS, layout)))
        except (AssertionError, OSError, ToolkitError) as error:  # what one run met says nothing about the others
            rows[-1]["error"] = f"{type(error).__name__}: {error}"
        forget(run_dir)
    recorded(rows)
    missed = [row for row in rows if "error" in row or max(map(row.get, DIFFERENCES)) > row["bound"]]
    assert missed == []

"""Every layout trains as one process does; `make parity` runs them all and writes docs/parity.md."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import parity
import pytest
import torch
from launch import launch
from parity import (
    BOUND,
    LAYOUTS,
    VARIANTS,
    Layout,
    bound_of,
    difference,
    forget,
    job_of,
    run,
    run_in_two,
    train,
    variants_of,
)

ROOT = Path(__file__).parents[2]
RESUMED, FROM_ONE, ON_ONE = "resumed", "begun by one process", "ended by one process"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run of one process with a variant's settings, and a model's arguments, made once."""
    folder = tmp_path_factory.mktemp("alone")

    def run_alone(variant: str, args: Mapping[str, Any] = MappingProxyType({})) -> Path:
        run_dir = folder / "-".join([variant.replace(" ", "-"), *args])
        return run_dir if run_dir.exists() else run(Layout("alone", 1, args=dict(args)), run_dir, **VARIANTS[variant])

    return run_alone


@pytest.mark.parametrize(
    ("layout", "variant"),
    [
        ("replicate 2", "clipped"),
        ("shard 2 zero 1", "plain"),
        ("shard 3 zero 3", "clipped"),
        ("replicate 2 x shard 2 zero 2", "one pass"),
        ("replicate 2 x shard 2 zero 3", "bf16"),
        ("shard 2 zero 3 x tp 2", "clipped"),
        ("pp 2 x tp 2, sequence", "recomputed"),
        ("pp 2 x shard 2 zero 1", "clipped"),
    ],
)
def test_a_layout_trains_as_one_process_does(alone, tmp_path, layout, variant):
    found = difference(run(LAYOUTS[layout], tmp_path / "run", **VARIANTS[variant]), alone(variant))
    assert found.largest <= bound_of(variant), found


@pytest.mark.parametrize(("first", "then"), [("shard 2 zero 3", "replicate 2"), ("replicate 2", "pp 2 x tp 2")])
def test_a_run_goes_on_with_another_strategy(alone, tmp_path, first, then):
    found = difference(run_in_two(LAYOUTS[first], LAYOUTS[then], tmp_path / "run"), alone("plain"))
    assert found.largest <= BOUND, found


def run_variant(layout: Layout, name: str, run_dir: Path) -> Path:
    if name in VARIANTS:
        return run(layout, run_dir, **VARIANTS[name])
    one = Layout("alone", 1, args=layout.args)
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
    import toolkit.train.loop as loop

    share = loop.share
    loop.share = lambda first, batch, rank, size: share(first, batch, 0, size)
    train(world, config)


@pytest.mark.parametrize(
    ("bug", "layout"),
    [
        (_without_the_factor, "replicate 2"),
        (_clipped_by_own_norm, "shard 2 zero 3"),
        (_all_ranks_read_the_same, "replicate 2"),
    ],
)
def test_a_planted_bug_exceeds_the_bound(alone, tmp_path, bug, layout):
    launch(bug, 2, tmp_path / "run", job_of(LAYOUTS[layout], **VARIANTS["clipped"]), timeout_s=240)
    assert difference(tmp_path / "run", alone("clipped")).largest > 100 * BOUND


@pytest.mark.evidence
@pytest.mark.timeout(3 * 3600)
def test_every_layout_trains_as_one_process_does(alone, tmp_path):
    # First: the checkout may change while this runs.
    version = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    rows = []
    for layout in LAYOUTS.values():
        for name in (*variants_of(layout), RESUMED, FROM_ONE, ON_ONE):
            run_dir = run_variant(layout, name, tmp_path / "run")
            found = difference(run_dir, alone(name if name in VARIANTS else "plain", layout.args))
            rows.append({"layout": layout.name, "variant": name, "bound": bound_of(name), **vars(found)})
            forget(run_dir)
    found_all = {
        "commit": version.stdout.strip(), "torch": torch.__version__, "time": datetime.now(UTC).isoformat(),
        "steps": parity.STEPS, "rows": rows,
    }  # fmt: skip
    (ROOT / "evidence").mkdir(exist_ok=True)
    (ROOT / "evidence" / "parity.json").write_text(json.dumps(found_all, indent=1))
    missed = [row for row in rows if max(row["loss"], row["gradient"], row["parameter"]) > row["bound"]]
    assert missed == []

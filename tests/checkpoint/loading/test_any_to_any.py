"""Saved on any layout, loaded on any other: every bit of parameters and moments, and the losses that follow."""

from __future__ import annotations

import itertools
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from any_to_any import LAYOUTS, OPTIMIZERS, Crossing, cross
from layouts import Layout

ROOT = Path(__file__).parents[3]
# Float32 sums in another order. Ranks of a power of two that see the same samples average to the same bits.
LARGEST_LOSS_ERROR = 1e-6

# Each layout of the sample loads what another one saved.
SAMPLE = (
    Layout("alone"), Layout("fsdp tp", shard=2, tp=2), Layout("ddp", replicate=2), Layout("fsdp columns", shard=2),
    Layout("fsdp", shard=3),
)  # fmt: skip


def assert_the_same(crossings: list[Crossing]) -> None:
    assert [one for one in crossings if one.differing] == []
    assert [one for one in crossings if one.loss_error > LARGEST_LOSS_ERROR] == []
    assert [one for one in crossings if one.saved_by == one.loaded_by and one.loss_error] == []


@pytest.mark.timeout(600)  # starts of ranks, on a machine that may be busy
def test_a_sample_of_layouts_gives_others_every_bit(tmp_path):
    chosen = itertools.cycle(OPTIMIZERS)
    crossings = [
        ((SAMPLE[(place + 1) % len(SAMPLE)], optimizer), (target, optimizer))
        for (place, target), optimizer in zip(enumerate(SAMPLE), chosen, strict=False)
    ]
    found = list(cross(tmp_path, crossings))
    assert len(found) == len(SAMPLE)
    # 15 parameters and 2 buffers; three entries of AdamW a parameter, one of SGD.
    assert {one.optimizer: one.tensors for one in found} == {"AdamW": 17 + 3 * 15, "SGD": 17 + 15}
    assert_the_same(found)


@pytest.mark.evidence
@pytest.mark.timeout(3600)
def test_every_layout_gives_every_other_every_bit(tmp_path):
    # First: the checkout may change while this runs.
    version = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    pairs = list(itertools.product(LAYOUTS, LAYOUTS))
    # SGD's one buffer lies as AdamW's two do: every seventh pair will do.
    cases = [((source, "AdamW"), (target, "AdamW")) for source, target in pairs]
    cases += [((source, "SGD"), (target, "SGD")) for source, target in pairs[::7]]
    found = list(cross(tmp_path, cases))
    stamp = {
        "commit": version.stdout.strip(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "layouts": [{"name": layout.name, "ranks": layout.ranks} for layout in LAYOUTS],
        "crossings": [vars(one) for one in found],
    }
    (ROOT / "evidence").mkdir(exist_ok=True)
    (ROOT / "evidence" / "reshard_matrix.json").write_text(json.dumps(stamp, indent=1) + "\n")
    assert len(found) == len(cases)
    assert_the_same(found)

"""`toolkit ckpt diff`: exit code 0 for equal and 1 for different, and what differs in words and in JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from ckpt_runs import SHARD, flip, save, two_steps, typed


@pytest.fixture
def run(tmp_path) -> Path:
    return two_steps(tmp_path)


def test_equal_checkpoints(run):
    done = typed("diff", f"{run}:10", run)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "1 of 1 tensors are equal"
    assert json.loads(typed("diff", f"{run}:10", run, "--json").stdout) == {
        "a": {"path": str(run / "checkpoints" / "step-00000010"), "step": 10},
        "b": {"path": str(run / "checkpoints" / "step-00000020"), "step": 20},
        "equal": True, "tensors": {"compared": 1, "equal": 1}, "differences": [], "values": [],
    }  # fmt: skip


def test_every_kind_of_difference_is_printed(run):
    same = torch.ones(3)
    save(
        run, 30, {"gone": same, "same": same, "w": {"shape": same, "type": same, "value": same}, "lr": 0.5}, {"loss": 1}
    )
    new = {"new": same, "same": same, "lr": 0.25}
    other = {"shape": torch.ones(3, 1), "type": same.half(), "value": torch.tensor([1.0, math.nan, -3.0])}
    save(run, 40, new | {"w": other}, {"loss": math.inf})
    done = typed("diff", f"{run}:30", f"{run}:40")
    assert (done.returncode, done.stderr) == (1, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[3:8] == [
        ["gone", "only", "in", "A", "float32", "[3]"],
        ["new", "only", "in", "B", "float32", "[3]"],
        ["w.shape", "different", "shape", "float32", "[3]", "->", "float32", "[3,", "1]"],
        ["w.type", "different", "type", "0", "of", "3", "0", "0", "0", "0", "float32", "[3]", "->", "float16", "[3]"],
        ["w.value", "differs", "2", "of", "3", "4", "1.33", "4", "1.26", "NaN:", "0", "->", "1"],
    ]
    assert done.stdout.splitlines()[8:] == [
        "lr: 0.5 -> 0.25",
        "state.loss: 1 -> inf",
        "1 of 6 tensors are equal, 1 only in A, 1 only in B, 1 different shape, 1 different type, 1 differ, 2 values differ",
    ]
    answer = json.loads(typed("diff", f"{run}:30", f"{run}:40", "--json").stdout)
    found = {one["key"]: one for one in answer["differences"]}
    assert found["new"] == {"key": "new", "what": "only_in_b", "a": None, "b": {"dtype": "float32", "shape": [3]}}
    assert (found["w.value"]["largest"], found["w.value"]["nans_b"]) == (4.0, 1)
    assert answer["values"] == [
        {"key": "lr", "a": 0.5, "b": 0.25}, {"key": "state.loss", "a": 1, "b": {"$float": "inf"}},
    ]  # fmt: skip
    assert typed("diff", f"{run}:30", f"{run}:40", "--only", "same").returncode == 0


def test_only_those_that_differ_most(run):
    save(run, 30, {f"w{number}": torch.ones(2) for number in range(5)} | {"alone": torch.ones(2)})
    save(run, 40, {f"w{number}": torch.ones(2) * (1 + number) for number in range(5)})
    done = typed("diff", f"{run}:30", f"{run}:40", "-n", 2)
    assert [line.split()[0] for line in done.stdout.splitlines()[3:5]] == ["w4", "w3"]
    assert done.stdout.endswith("1 of 6 tensors are equal, 1 only in A, 4 differ (3 not shown)\n")


def test_damage_is_no_equality(run):
    """The blocks are those that both checkpoints say they hold, and one of them does not."""
    flip(run / "checkpoints" / "step-00000010" / SHARD, -1)
    done = typed("diff", f"{run}:10", f"{run}:20")
    assert done.returncode == 1 and "DAMAGED" in done.stdout and "step-00000010" in done.stdout.splitlines()[3]
    assert done.stdout.endswith("0 of 1 tensors are equal, 1 DAMAGED\n")


def test_a_missing_shard_is_damage(run):
    (run / "checkpoints" / "step-00000020" / SHARD).unlink()
    done = typed("diff", f"{run}:10", f"{run}:20")
    assert (done.returncode, done.stderr) == (1, "") and f"{SHARD}: is missing" in done.stdout

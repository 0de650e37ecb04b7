"""Typed values of a manifest: shown and compared without torch, and rejected where their content is not what was written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ckpt_runs import ALONE

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.manifest_file import read_body

STATE = {"shape": torch.Size([2]), "mean": np.float32(1.5), "seen": {"b", "a"}, "pair": (torch.ones(2), b"x")}


def test_a_checkpointer_stores_them_in_its_state_and_among_its_tensors(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, ALONE)
    folder = checkpoints.save(1, {"w": torch.ones(1), "own": {"type": torch.float16}}, STATE)
    target = {"w": torch.zeros(1), "own": {"type": None}}
    loaded = Checkpointer(tmp_path, ALONE).load(target)
    assert loaded is not None and target["own"]["type"] is torch.float16
    assert repr(loaded.state["mean"]) == repr(STATE["mean"]) and loaded.state["seen"] == STATE["seen"]
    assert type(loaded.state["shape"]) is torch.Size and torch.equal(loaded.state["pair"][0], torch.ones(2))
    assert read_body(folder)["schema"] == 3


def test_plain_values_keep_the_schema_that_older_versions_read(tmp_path: Path) -> None:
    state = {"text": '{"$set": [1]}', "pair": (1, float("inf")), 3: None}
    folder = Checkpointer(tmp_path, ALONE).save(1, {"w": torch.ones(1)}, state)
    assert read_body(folder)["schema"] == 1


def test_commands_show_and_compare_them_without_torch(toolkit, tmp_path: Path, monkeypatch) -> None:
    one, other = ({**STATE, "mean": np.float32(number)} for number in (1, 2))
    first = Checkpointer(tmp_path / "a", ALONE).save(1, {"w": torch.ones(1)}, one)
    second = Checkpointer(tmp_path / "b", ALONE).save(1, {"w": torch.ones(1)}, other)
    assert "torch.Size" in toolkit.ok("ckpt", "show", first)
    assert json.loads(toolkit.ok("ckpt", "show", first, "--json"))["state"]["shape"] == {"$torch.Size": [2]}
    said = toolkit("ckpt", "diff", first, second)
    assert said.code == 1 and "state.mean" in said.out and "state.pair" not in said.out


@pytest.mark.parametrize("hostile", [{"$os.system": "true"}, {"$set": [1], "more": 2}, {"$builtins.eval": "1"}])
def test_unknown_tags_are_damage(hostile: dict) -> None:
    with pytest.raises(CorruptCheckpointError, match="not a valid value"):
        jsonvalues.decode(hostile, "x")


@pytest.mark.parametrize(
    "hostile",
    [
        {"$torch.dtype": "load"},
        {"$torch.dtype": "hub.load"},
        {"$torch.memory_format": "float32"},
        {"$numpy": ["O", [1], "AAAAAAAAAAA="]},
        {"$numpy": ["i4,O", [1], "AAAAAAAAAAA="]},
        {"$numpy": ["<f4", [2**40], "AAAA"]},
        {"$numpy.dtype": "O"},
        {"$torch.Tensor": ["float32", [2**40], "AAAA", "cpu", False]},
        {"$torch.Tensor": ["load", [1], "AAAA", "cpu", False]},
        {"$torch.Tensor": ["float32", [-1, -1], "AAAAAA==", "cpu", False]},
        {"$torch.Tensor": ["float32", [1], "AAAAAA==", "cpu"]},
        {"$set": [[1]]},
        {"$set": 5},
        {"$range": [1, 2, 0]},
        {"$bytes": "not base64!"},
        {"$datetime": "yesterday"},
        {"$deque": []},
        {"$OrderedDict": [[1, 2, 3]]},
        {"$complex": [1, 2]},
        {"$set": [{"$os.system": "true"}]},
    ],
)
def test_hostile_content_is_damage(hostile: dict) -> None:
    with pytest.raises(CorruptCheckpointError, match="x"):
        jsonvalues.restored(jsonvalues.decode(hostile, "x"), "x")


def test_a_value_inside_itself_and_a_deep_one_are_refused() -> None:
    from collections import deque

    from toolkit.errors import ToolkitError

    own: deque = deque()
    own.append(own)
    with pytest.raises(ToolkitError, match="contains a reference to itself"):
        jsonvalues.encode(own, "x")
    deep: dict = {"$set": []}
    for _ in range(5000):
        deep = {"$deque": [None, deep]}
    with pytest.raises(CorruptCheckpointError):
        jsonvalues.restored(jsonvalues.decode(deep, "x"), "x")

"""The choice by measurement: made from what was measured, alike on all ranks, kept for this layout and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from toolkit.comm.cost.choice import choose
from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory

KIB = 1024


def measure(state, folder: str, hosts: list[str]):
    run = RunDirectory(Path(folder))
    communicator = state.communicator
    all_reduce = lambda tensor, name: communicator.all_reduce(tensor, algorithm=name)  # noqa: E731
    choice = choose(communicator.peers, hosts, communicator.algorithms, all_reduce, run, budget_s=0.2)
    return choice.source, choice.line, [choice.algorithm(size) for size in (KIB, 100 * KIB, 10_000 * KIB)]


def test_all_ranks_choose_alike_and_the_next_attempt_need_not_measure(ranks, tmp_path):
    pool = ranks(4)
    first = pool.run(measure, str(tmp_path), ["one", "two"])
    assert len({str(said) for said in first}) == 1
    assert first[0][0].startswith("measured in ")
    kept = json.loads((tmp_path / "links.json").read_text())
    again = pool.run(measure, str(tmp_path), ["one", "two"])
    assert again[0][0] == f"measured {kept['time']}"
    assert again[0][2] == first[0][2]


@pytest.mark.parametrize("damage", ["{", "[]", '{"hosts": ["one", "two"]}', '{"fold_s_per_byte": "x"}'])
def test_a_damaged_measurement_is_made_anew_and_said(ranks, tmp_path, damage):
    (tmp_path / "links.json").write_text(damage)
    ((source, _, _), *_) = ranks(4).run(measure, str(tmp_path), ["one", "two"])
    assert source.startswith("measured in ") and "links.json of the run is damaged" in source
    assert json.loads((tmp_path / "links.json").read_text())["hosts"] == ["one", "two"]


def test_other_nodes_are_measured_anew(ranks, tmp_path):
    pool = ranks(4)
    pool.run(measure, str(tmp_path), ["one", "two"])
    ((source, _, _), *_) = pool.run(measure, str(tmp_path), ["one", "three"])
    assert "links.json of the run was measured on other nodes" in source


def ask_too_early(state):

    with pytest.raises(ToolkitError, match="algorithm 'fastest' requires a measurement of the links") as caught:
        state.communicator.all_reduce(torch.ones(4), "sum", "fastest")
    assert "choose_by_measurement" in caught.value.fix


def test_the_fastest_needs_a_measurement(ranks):
    ranks(2).run(ask_too_early)

"""`toolkit topo groups`: the groups of a job on a machine, and clear words where they do not fit."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "topology.md"
MESH = ("--set", "parallel.tp=8", "--set", "parallel.shard=4")


def test_the_page_shows_what_is_printed(toolkit):
    shown = re.search(r"^\$ toolkit (topo groups .*)\n((?:.+\n)+)```", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert shown, "the page has an example"
    assert toolkit.ok(*shlex.split(shown[1])).startswith(shown[2])


def test_json_has_the_keys_of_the_page_and_every_rank_once(toolkit):
    said = json.loads(toolkit.ok("topo", "groups", "train_lm", "--machine", "dgx-a100", "-N", "8", "--ntasks-per-node",
                                 "8", "--leaves", "3,5", *MESH, "--json"))  # fmt: skip
    section = PAGE.read_text(encoding="utf-8").split("## Which ranks talk over which links")[1].split("\n## ")[0]
    assert list(said) == re.findall(r"^\| `(\w+)` ", section, re.MULTILINE)
    assert sorted(said["order"]) == list(range(64))
    assert said["dimensions"]["tp"]["placed"]["groups_at"] == {"clique": 8}
    assert any("8 of 16 shard groups" in line for line in said["compromises"])


def test_explain_names_the_source_of_every_figure(toolkit):
    said = toolkit.ok("topo", "groups", "train_lm", "--machine", "gb200", "-N", "32", "--ntasks-per-node", "4",
                      "--leaves", "16,16", *MESH, "--explain")  # fmt: skip
    assert "clique: 2 groups, 3 us, 900 GB/s a rank [18 links by NVIDIA GB200 NVL72 data sheet; NVLink 5: 50 GB" in said
    assert "leaf: 2 groups, 10 us, 50 GB/s a rank [mlx5_0: 400 Gbit/s for 1 rank, by NVIDIA GB200" in said
    assert re.search(r"^order of ranks: \d", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--machine: nothing says what the nodes are. Fix: give one of dgx-a100"),
        (("--machine", "dgx"), "no machine 'dgx' is known"),
        (("--machine", "dgx-1", "--leaves", "3"), "3 is 3 nodes, and the job has 2. Fix: give numbers that add up to 2"),
        (("--machine", "dgx-1", "--leaves", "x"), "'x' is no list of numbers"),
        (("--machine", "dgx-1", "--bytes", "tp=-1"), "'tp=-1' is not DIM=BYTES"),
        (("--machine", "gb200",), "8 ranks on a gb200, which has 4 GPUs. Fix: give --ntasks-per-node 4, or less"),
        (("--machine", "dgx-a100", "--ntasks-per-node", "7", "--set", "parallel.tp=2"),
         "parallel.tp: tp = 2 does not divide the 7 ranks of a node"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_fix(toolkit, options, said):
    given = toolkit("topo", "groups", "train_lm", "-N", "2", "--ntasks-per-node", "8", *options)
    assert (given.code, said in given.err, given.out) == (2, True, ""), given

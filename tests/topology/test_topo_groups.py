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
    shown = re.findall(r"^\$ toolkit (topo groups .*)\n((?:.+\n)+)```", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) == 2, "the page has examples"
    for command, printed in shown:
        assert toolkit.ok(*shlex.split(command)).startswith(printed)


def test_json_has_the_keys_of_the_page_and_every_rank_once(toolkit):
    said = json.loads(toolkit.ok("topo", "groups", "train_lm", "--machine", "dgx-a100", "-N", "8", "--ntasks-per-node",
                                 "8", "--leaves", "3,5", *MESH, "--json"))  # fmt: skip
    section = PAGE.read_text(encoding="utf-8").split("`--json` has:")[1].split("\n### ")[0]
    assert list(said) == re.findall(r"^\| `(\w+)` ", section, re.MULTILINE)
    assert sorted(said["order"]) == list(range(64))
    assert said["dimensions"]["tp"]["placed"]["groups_at"] == {"clique": 8}
    assert said["traffic"]["tp"] == {"exchange": "all-reduce", "payload_bytes": 4e9, "calls": 128, "source": "nominal"}
    assert any("8 of 16 shard groups" in line for line in said["compromises"])


def test_explain_names_the_source_of_every_figure(toolkit):
    said = toolkit.ok("topo", "groups", "train_lm", "--machine", "gb200", "-N", "32", "--ntasks-per-node", "4",
                      "--leaves", "16,16", *MESH, "--explain")  # fmt: skip
    assert (
        "clique: 2 groups, 3 us, 900 GB/s per rank [18 links according to NVIDIA GB200 NVL72 data sheet; NVLink 5: 50 GB"
        in said
    )
    assert "leaf: 2 groups, 10 us, 50 GB/s per rank [mlx5_0: 400 Gbit/s for 1 rank, from NVIDIA GB200" in said
    assert re.search(r"^order of ranks: \d", said, re.MULTILINE)


def test_the_models_shape_the_jobs_batch_and_a_figure_by_hand_decide_together(toolkit):
    shape = "7e9,layers=32,width=4096,context=2048,key-width=1024,experts=8,experts-per-token=1,bytes=4"
    job = ("topo", "groups", "train_lm", "--machine", "dgx-a100", "-N", "2", "--ntasks-per-node", "8", "--set",
           "train.batch=64", "--set", "train.micro_batch=2", "--set", "parallel.tp=2", "--set", "parallel.shard=4",
           "--set", "parallel.ep=4", "--model", shape, "--bytes", "replicate=0")  # fmt: skip
    traffic = json.loads(toolkit.ok(*job, "--json"))["traffic"]
    # 64 samples over 2 x 4 ranks are four micro-batches of two; tokens x width x 4 bytes, four times in each layer.
    assert traffic["tp"]["payload_bytes"] == traffic["ep"]["payload_bytes"] == 4 * 32 * 4 * (2 * 2048 * 4096 * 4)
    assert (traffic["replicate"]["payload_bytes"], traffic["replicate"]["source"]) == (0, "--bytes")
    assert "micro-batches per step: 4 of 2 samples [train.batch]\n" in toolkit.ok(*job, "--explain")


def test_a_job_that_keeps_the_launchers_order_is_said_to(toolkit):
    job = ("topo", "groups", "train_lm", "--machine", "dgx-1", "-N", "1", "--ntasks-per-node", "8")
    said = "the job keeps the rank placement of the launcher: parallel.placement"
    assert said in toolkit.ok(*job, "--set", "parallel.placement=launched")
    assert said not in toolkit.ok(*job)


def test_a_fix_is_typed_as_it_stands(toolkit):
    job = ("topo", "groups", "train_lm", "--machine", "dgx-1", "-N", "2", "--ntasks-per-node", "8")
    said = toolkit(*job, "--set", "parallel.tp=3").err
    for choice in said.split("Fix: set ")[1].split(", or "):
        names = re.findall(r"(\w+) = (\d+)", choice)
        settings = [word for name, size in names for word in ("--set", f"parallel.{name}={size}")]
        table = toolkit.ok(*job, *settings)
        assert [f"{name} " in table for name, _ in names] == [True, True]


def test_of_a_range_of_nodes_the_most_are_shown_and_that_is_said(toolkit):
    job = ("topo", "groups", "train_lm", "--machine", "dgx-1", "--ntasks-per-node", "8", "--json")
    range_of, most = toolkit(*job, "-N", "2-4"), toolkit(*job, "-N", "4")
    assert range_of.err == "nodes: 4, the maximum of 2-4; -N 2 shows the minimum\n"
    assert (most.err, most.out) == ("", range_of.out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--machine: the machine type of the nodes is missing. Fix: choose one of dgx-a100"),
        ((), "dgx-1, gb200, pcie-8, or --facts FILE with the output of `toolkit topo show --json` from each node"),
        (("--machine", "dgx"), "unknown machine 'dgx'"),
        (("--machine", "dgx-1", "--leaves", "3"), "3 adds up to 3 nodes, but the job has 2. Fix: pass numbers that add up to 2"),
        (("--machine", "dgx-1", "--leaves", "x"), "expected a list of whole numbers, got 'x'"),
        (("--machine", "dgx-1", "--leaves", "2,0"), "--leaves: 2,0 has a leaf switch without nodes. Fix: pass the number of nodes below each"),
        (("--machine", "dgx-1", "--leaves", "9" * 5000), "exceeds the limit of 100000 nodes"),
        (("--machine", "dgx-1", "-N", "100001"), "-N 100001:job.nodes: 100001 exceeds the limit of 100000 nodes"),
        (("--machine", "dgx-1", "--bytes", "tp=1"), "--bytes: dimension tp has a single rank, which exchanges nothing. Fix: omit tp=1"),
        (("--machine", "dgx-1", "-p", "gpu"), "No such option '-p'. Fix: see `toolkit topo groups --help`"),
        (("--machine", "dgx-1", "-A", "me"), "No such option '-A'"),
        (("--machine", "dgx-1", "-a", "0-3"), "No such option '-a'"),
        (("--machine", "dgx-1", "-o", "x.log"), "No such option '-o'"),
        (("--machine", "dgx-1", "--set", "parallel.tp=3"), "Fix: set tp = 4 and replicate = 4, or tp = 2 and replicate = 8"),
        (("--machine", "dgx-1", "--bytes", "tp=-1"), "expected DIM=BYTES, got 'tp=-1'"),
        (("--machine", "dgx-1", "--bytes", "tp=many"), "expected DIM=BYTES, got 'tp=many'"),
        (("--machine", "dgx-1", "--model", ""), "--model: expected a number of parameters, got ''. Fix: begin with one"),
        (("--machine", "dgx-1", "--model", "7e9"), "'7e9' lacks layers and width and context. Fix: add the missing values, as"),
        (("--machine", "dgx-1", "--model", "7e9,depth=3"), "'depth' is not a property of a model. Fix: use layers, width"),
        (("--machine", "dgx-1", "--model", "7e9,layers=2.5"), "expected a whole number of at least 1, got 'layers=2.5'"),
        (("--machine", "dgx-1", "--model", "7e9,layers=inf"), "expected a whole number of at least 1, got 'layers=inf'"),
        (("--machine", "dgx-1", "--model", "7e9,layers=2,width=8,context=8", "--set", "parallel.shard=8", "--set",
          "parallel.ep=2"), "parallel.ep: ep = 2 requires a model with experts"),
        (("--machine", "gb200",), "8 ranks per node, but a gb200 has 4 GPUs. Fix: pass --ntasks-per-node 4 or less"),
        (("--machine", "dgx-a100", "--ntasks-per-node", "7", "--set", "parallel.tp=2"),
         "parallel.tp: 7 ranks per node are not divisible by tp = 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_fix(toolkit, options, said):
    given = toolkit("topo", "groups", "train_lm", "-N", "2", "--ntasks-per-node", "8", *options)
    assert (given.code, said in given.err, given.out) == (2, True, ""), given

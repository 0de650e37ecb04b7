"""`topo show`, `topo plot` and `topo groups --facts`: the page's keys, trees, pictures without overlaps, clear refusals."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from machine_fakes import h100_pair

from toolkit.cli import topo
from toolkit.config.train import ParallelTable
from toolkit.observe.pictures.topology_drawing import Box, Drawing, draw
from toolkit.parallel.rank_order import order_ranks
from toolkit.topology.facts import Claimed, Fact, Hardware, LinkFact, NodeFacts, Topology, unknown
from toolkit.topology.machine_facts import topology_of_machine
from toolkit.topology.probe import probe_node, unknown_hardware
from toolkit.topology.topology_json import NodeRecord, topology_as_json, topology_of_node, write_topology

PAGE = Path(__file__).parents[2] / "docs" / "topology.md"
SECTION = PAGE.read_text(encoding="utf-8").split("### As JSON")[1].split("### As a picture")[0]


@pytest.fixture
def contradicted(tmp_path, monkeypatch) -> NodeFacts:
    monkeypatch.setenv("PATH", str(tmp_path))
    nvml, system = h100_pair(tmp_path / "sys")
    node = probe_node(Fact("node7", "test", "direct"), {}, nvml=nvml, system_root=system)
    fact = Fact(
        None, "NVML, lscpu", "unknown", "sources contradict each other", (Claimed(1, "NVML"), Claimed(0, "lscpu"))
    )
    gpus = (node.hardware.gpus[0], replace(node.hardware.gpus[1], numa_node=fact))
    return replace(node, hardware=replace(node.hardware, gpus=gpus))


def keys(title: str) -> list[str]:
    table = SECTION.split(f"| {title} | means |")[1].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)` ", table, re.MULTILINE)


def test_json_has_the_keys_of_the_page(contradicted):
    body = topology_as_json(topology_of_node(contradicted))
    assert list(body) == keys("key")
    (kind,) = body["hardware"].values()
    said = {name: re.search(rf"^\| `{name}` \| (.*) \|$", SECTION, re.MULTILINE)[1] for name in ("hardware", "nodes")}
    assert list(kind) == said["hardware"].split(": ")[1].split(", ") == list(Hardware.__dataclass_fields__)
    assert [w.split(" ")[0] for w in said["nodes"].split(": ")[1].split(", ")] == list(NodeRecord.__dataclass_fields__)
    assert list(kind["gpus"][1]["numa_node"]) == keys("key of a fact")
    assert body["contradictions"] == {"node7": ["GPU1 numa_node: NVML says 1, lscpu says 0"]}


def test_the_tree_has_devices_below_their_numa_nodes_and_contradictions_at_the_end(toolkit, contradicted, tmp_path):
    path = tmp_path / "facts.json"
    path.write_text(write_topology(topology_of_node(contradicted)))
    lines = toolkit.ok("topo", "show", "--facts", path).splitlines()
    text = "\n".join(lines)
    assert lines[0] == "node7 [test]"
    assert "│   └── NUMA node 0 CPUs 0-3, 16 GiB  [/sys]" in text
    assert "│       ├── GPU0 NVIDIA H100 80GB HBM3, 80 GiB, MIG off, 0000:03:00.0" in text
    assert "nearest NIC: mlx5_0 (PIX)  [/sys]" in text
    assert "NUMA node: unknown, sources contradict each other: NVML says 1, lscpu says 0  [NVML, lscpu]" in text
    assert "switches: unknown, SLURM_TOPOLOGY_ADDR is not set" in text
    assert "NVLink cliques: GPU 0,1" in text
    assert lines[-2:] == ["contradictions", "└── GPU1 numa_node: NVML says 1, lscpu says 0"]


def test_show_counts_the_unknown_facts_that_a_job_counts(toolkit, tmp_path):
    """A job's log says how many there are, and where to read them."""
    hardware = unknown_hardware("test", "nobody was asked")
    node = NodeFacts(Fact("node7", "test", "direct"), unknown("SLURM_TOPOLOGY_ADDR", "is not set"), hardware)
    path = tmp_path / "facts.json"
    path.write_text(write_topology(topology_of_node(node)))
    with_ranks = Topology((node,), {"node7": (0, 1)})
    said = order_ranks(ParallelTable(), with_ranks).line
    assert "3 topology facts are unknown, see `toolkit topo show`" in said
    shown = toolkit.ok("topo", "show", "--facts", path).splitlines()
    at = shown.index("3 unknown facts that toolkit needs to place ranks")
    assert len(shown) - at - 1 == 3 and all("node7: " in line for line in shown[at + 1 :])
    path.write_text(write_topology(with_ranks))
    assert toolkit.ok("topo", "show", "--facts", path).splitlines()[at:] == shown[at:]


def test_show_asks_this_node_and_keeps_warnings_off_its_answer(toolkit, contradicted, monkeypatch):
    monkeypatch.setattr(
        "toolkit.topology.probe.probe_node", lambda host: replace(contradicted, warnings=("lscpu: odd",))
    )
    said = toolkit("topo", "show", "--json")
    assert (said.code, said.err) == (0, "warning: lscpu: odd\n")
    assert json.loads(said.out)["nodes"][0]["warnings"] == ["lscpu: odd"] and said.out.count("\n") == 1
    assert topo.show.name == "show"


def test_groups_of_facts_are_those_of_the_machine(toolkit, tmp_path):
    path = tmp_path / "facts.json"
    nodes = topology_of_machine("dgx-a100", [4, 4])
    path.write_text("\n".join(write_topology(replace(nodes, nodes=(node,))) for node in reversed(nodes.nodes)))
    shape = ("topo", "groups", "train_lm", "-N", "8", "--ntasks-per-node", "8", "--json", "--set", "parallel.tp=8")
    told = json.loads(toolkit.ok(*shape, "--facts", path))
    planned = json.loads(toolkit.ok(*shape, "--machine", "dgx-a100", "--leaves", "4,4"))
    assert told["order"] == planned["order"] and told["dimensions"]["tp"]["placed"]["groups_at"] == {"clique": 8}
    wrong = toolkit(*shape[:3], "-N", "2", "--ntasks-per-node", "8", "--facts", path)
    assert "facts.json: the file describes 8 nodes, but the job has 2. Fix: pass -N 8" in wrong.err
    both = toolkit(*shape, "--facts", path, "--machine", "dgx-1")
    assert both.code == 2 and "--machine: " in both.err and "omit --machine" in both.err


def overlapping(drawing: Drawing, kinds: set[str]) -> list[tuple[Box, Box]]:
    boxes = [box for box in drawing.boxes if box.kind in kinds]
    return [
        (one, other)
        for one, other in combinations(boxes, 2)
        if one.x + one.width > other.x + 1e-6
        and other.x + other.width > one.x + 1e-6
        and one.y + one.height > other.y + 1e-6
        and other.y + other.height > one.y + 1e-6
    ]


@pytest.mark.parametrize(
    ("machine", "leaves"),
    [
        ("dgx-a100", [1]),
        ("dgx-1", [1]),
        ("gb200", [18]),
        ("pcie-8", [1]),
        ("dgx-a100", [4, 4]),
        ("gb200", [20, 3]),
        ("dgx-1", [90, 7]),
    ],
)
def test_nothing_overlaps_on_a_picture(machine, leaves):
    drawing = draw(topology_of_machine(machine, leaves), machine)
    assert not overlapping(drawing, {"gpu", "nic", "leaf"})
    assert not overlapping(drawing, {"node", "leaf", "more", "spine"})
    assert not overlapping(drawing, {"fabric"})
    for box in drawing.boxes:
        if box.kind in ("gpu", "nic", "clique"):
            (home,) = [one for one in drawing.boxes if one.kind == "node" and one.x < box.x < one.x + one.width
                       and one.y < box.y < one.y + one.height]  # fmt: skip
            assert box.x + box.width < home.x + home.width and box.y + box.height < home.y + home.height
    assert all(box.x >= 0 and box.x + box.width <= drawing.width for box in drawing.boxes)
    assert all(0 <= y <= drawing.height for wire in drawing.wires for y in (wire.start[1], wire.end[1]))


def test_a_place_that_takes_no_picture_is_refused_before_this_node_is_asked(toolkit, monkeypatch):
    monkeypatch.setattr("toolkit.topology.probe.probe_node", lambda host: pytest.fail("asked"))
    assert toolkit("topo", "plot", "-o", "/nonexist/x.svg").code == 2


def test_the_largest_cluster_is_drawn_within_seconds():
    """Its first nodes are; that all others are counted must not take longer with each of them."""
    topology = topology_of_machine("dgx-1", [50_000])
    start = time.process_time()
    drawing = draw(topology, "large")
    assert time.process_time() - start < 1.0
    assert [box.label for box in drawing.boxes if box.kind == "more"] == ["and 49998\nmore nodes"]


def test_nics_of_one_gpu_stand_side_by_side():
    """All of them are nearest to the first GPU, in the corner of its node."""
    topology = topology_of_machine("dgx-a100", [1])
    (node,) = topology.nodes
    near = tuple(("GPU0", nic.name) for nic in node.hardware.nics.value)
    links = (LinkFact(Fact("PIX", "test", "direct"), near),)
    crowded = replace(topology, nodes=(replace(node, hardware=replace(node.hardware, links=links)),))
    drawing = draw(crowded, "crowded")
    (home,) = [box for box in drawing.boxes if box.kind == "node"]
    nics = [box for box in drawing.boxes if box.kind == "nic"]
    assert not overlapping(drawing, {"nic"}) and len(nics) == 8
    assert all(home.x < nic.x and nic.x + nic.width < home.x + home.width for nic in nics)


def test_a_picture_is_written(toolkit, tmp_path):
    pytest.importorskip("matplotlib")
    matrix = tmp_path / "topo.txt"
    matrix.write_text("\tGPU0\tGPU1\tmlx5_0\nGPU0\t X \tNV4\tPIX\nGPU1\tNV4\t X \tSYS\nmlx5_0\tPIX\tSYS\t X \n")
    path = tmp_path / "node.svg"
    assert toolkit.ok("topo", "plot", "--input", matrix, "-o", path) == f"{path}\n"
    text = path.read_text()
    assert "<svg" in text and all(f"<!-- {word} -->" in text for word in ("GPU1", "mlx5_0", "PIX: one PCIe switch"))


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (
            ("--machine", "dgx-1", "-o", "x.gif"),
            2,
            "x.gif: unsupported image format: .gif. Fix: use one of the suffixes .svg, .png",
        ),
        (("--machine", "dgx", "-o", "x.svg"), 2, "unknown machine 'dgx'. Fix: choose one of dgx-a100"),
        (("--machine", "dgx-1", "--facts", "f", "-o", "x.svg"), 2, "a picture shows only one input"),
        (("--leaves", "2", "-o", "x.svg"), 2, "--leaves: requires --machine"),
        (
            ("--machine", "dgx-1", "-o", "/nonexist/x.png"),
            2,
            "/nonexist/x.png: folder not found. Fix: run mkdir -p /nonexist",
        ),
        (("--machine", "dgx-1", "-o", "FOLDER.png"), 2, "FOLDER.png: expected a file, got a folder. Fix: pass "),
        (("--machine", "dgx-1", "--leaves", "0", "-o", "x.svg"), 2, "0 has a leaf switch without nodes"),
        (("--machine", "dgx-1", "--leaves", "1000000", "-o", "x.svg"), 2, "exceeds the limit of 100000 nodes. Fix"),
        (("--input", "EMPTY", "-o", "x.svg"), 2, "expected the output of nvidia-smi topo -m"),
        (("--facts", "EMPTY", "-o", "x.svg"), 2, "expected a topology in JSON, got an empty file"),
        (("--facts", "BINARY", "-o", "x.svg"), 2, "is not a text file"),
        (
            ("--facts", "nofile", "-o", "x.svg"),
            4,
            "nofile: no such file. Fix: pass the output of `toolkit topo show --json`",
        ),
        (("--input", "nofile", "-o", "x.svg"), 4, "nofile: no such file. Fix: pass the output of `nvidia-smi topo -m`"),
        (
            ("--input", "FOLDER.png", "-o", "x.svg"),
            2,
            "FOLDER.png: cannot be read: Is a directory. Fix: pass the output of",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_fix(toolkit, tmp_path, options, code, said):
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "FOLDER.png").mkdir()
    words = [str(tmp_path / word) if word in ("EMPTY", "BINARY", "FOLDER.png") else word for word in options]
    given = toolkit("topo", "plot", *words)
    assert (given.code, said in given.err, given.out) == (code, True, ""), given


def test_without_matplotlib_the_pip_line_is_said(toolkit, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = toolkit("topo", "plot", "--machine", "dgx-1", "-o", tmp_path / "x.svg")
    assert (said.code, said.err) == (
        2,
        "toolkit: -o: matplotlib is not installed. Fix: run pip install 'toolkit[plot]'\n",
    )

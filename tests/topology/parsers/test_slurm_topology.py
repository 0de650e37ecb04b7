"""Slurm's switches and blocks, from scontrol and from both files."""

import re
from pathlib import Path

import pytest

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.slurm_topology import parse_slurm_topology

SAMPLES = Path(__file__).parent / "samples"
TREE = """\
SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-8] Switches=spine[1-2]
SwitchName=spine1 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]
SwitchName=spine2 Level=1 LinkSpeed=1 Nodes=n[5-8] Switches=leaf3
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=n[5-8]
"""
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=n[1-4] BlockSize=4
BlockName=b2 BlockIndex=1 Nodes=n[5-6] BlockSize=4
"""


def warned(text):
    return parse_slurm_topology(text)[1]


def test_a_tree_is_read_from_its_records():
    facts, warnings = parse_slurm_topology(TREE)
    assert not warnings
    assert facts == {
        "switch_count": 6,
        "block_count": 0,
        "other_lines": [],
        "leaf_switches": {"core": 8, "spine1": 4, "spine2": 4, "leaf1": 2, "leaf2": 2, "leaf3": 4},
        "roots": ["core"],
        "levels": 3,
        "node_count": 8,
        "nodes_on_two_leaves": [],
        "undefined_child_switches": [],
        "single_tree": True,
    }
    without = re.sub(r" Level=\d LinkSpeed=1| Nodes=\S+(?= Switches)", "", TREE)
    of_file = parse_slurm_topology("# ours\n\n" + without.replace("SwitchName", "switchname").replace("\n", " # x\n"))
    assert of_file == (facts | {"leaf_switches": {"leaf1": 2, "leaf2": 2, "leaf3": 4}}, ())


def test_blocks_have_no_tree():
    facts, warnings = parse_slurm_topology("BlockSizes=2,4\n" + BLOCKS)
    assert not warnings
    assert (facts["block_count"], facts["node_count"], facts["roots"], facts["single_tree"]) == (2, 6, None, None)


def test_the_newer_file_says_the_same():
    facts, warnings = parse_slurm_topology((SAMPLES / "slurm-topology-conf.2.txt").read_text())
    assert not warnings, "the same nodes may stand in two topologies"
    assert (facts["switch_count"], facts["block_count"], facts["node_count"]) == (3, 2, 6)
    assert (facts["leaf_switches"], facts["roots"]) == ({"leaf1": 4, "leaf2": 2}, ["core"])
    text = (
        "- topology: t\n  tree:\n    switches:\n      - switch: a\n        nodes: n1\n        nodes: n2\n        x: 1\n"
    )
    facts, warnings = parse_slurm_topology(text)
    assert (facts["leaf_switches"], facts["node_count"], facts["other_lines"]) == ({"a": None}, None, ["x: 1"])
    assert [warning.partition(":")[0] for warning in warnings] == ["line 4", "line 6", "line 7"]


def test_a_line_may_go_on_behind_a_backslash():
    facts, warnings = parse_slurm_topology("SwitchName=a \\\n  Nodes=n1,\\\nn2\nSwitchName=b Nodes=n3\n")
    assert (facts["node_count"], warnings) == (3, ())


@pytest.mark.parametrize(
    "text", ["scontrol: error: No topology information available\n", "No topology information available\n"]
)
def test_a_cluster_without_a_topology_has_none(text):
    facts, warnings = parse_slurm_topology(text)
    assert (facts["switch_count"], facts["block_count"], facts["node_count"], warnings) == (0, 0, 0, ())


@pytest.mark.parametrize(
    "text", ["", "\n", "# only a comment\n", "NodeName=n1 State=UP\n", "SwitchName\n", "SwitchName=\n"]
)
def test_another_text_is_refused_with_its_line(text):
    with pytest.raises(CheckFailedError) as refused:
        parse_slurm_topology(text)
    assert refused.value.where == "line 1"


@pytest.mark.parametrize(
    ("damage", "by", "said"),
    [
        ("Nodes=n[1-2]", "Nodes=n[1-", "line 4: leaf1: the host list"),
        ("Nodes=n[1-2]", "Nodes=n[1-2],,", "line 4: leaf1: nodes has an empty place"),
        ("Nodes=n[3-4]", "Nodes=n[2-3]", "line 5: n2 is listed by leaf1, too"),
        ("Level=1 LinkSpeed=1 Nodes=n[1-4]", "Level=0 LinkSpeed=1 Nodes=n[1-4]", "line 2: spine1 has Level=0, but 1"),
        ("Level=2", "Level=zwei", "line 1: core: level is no number"),
        ("Nodes=n[5-8]\n", "Nodes=n[5-7]\n", "line 3: spine2 and the switches below it list other nodes: n8"),
        ("leaf3 Level", "leef3 Level", "line 3: leaf3 below spine2 has no record"),
        ("spine[1-2]", "spine1", "line 3: spine2 stands below no switch, unlike others of Level=1"),
        ("Switches=leaf3", "Switches=leaf[2-3]", "line 3: leaf2 stands below spine2 and below spine1"),
        ("Switches=leaf3", "Switches=core", "in or above a ring"),
        ("SwitchName=leaf3", "SwitchName=leaf2", "line 6: switch leaf2 has a record on line 5, too"),
        ("LinkSpeed=1 Nodes=n[3-4]", "Nodes=n[3-4]", "line 5: leaf2 lacks linkspeed"),
        ("Level=0 LinkSpeed=1 Nodes=n[5-8]", "Level=0 LinkSpeed=1", "line 6: leaf3 lacks nodes or switches"),
        ("Nodes=n[1-2]\n", "Nodes=n[1-2]", "line 4: leaf1: nodes cannot be read"),
        ("Nodes=n[1-2]\n", "Nodes=n[1-2] ", "line 4: 2 records stand on one line"),
        ("Nodes=n[1-2]", "Nods=n[1-2]", "line 4: leaf1: not known: 'Nods=n[1-2]'"),
        ("Nodes=n[1-2]", "Nodes=n[1-2] Nodes=n3", "line 4: leaf1: nodes stands there twice"),
        ("SwitchName=leaf1", "SwitchName=leaf=1", "line 4: no name of a switch"),
        ("SwitchName=leaf1", "SwtchName=leaf1", "line 4: no record"),
    ],
)
def test_damage_is_named_with_its_line(damage, by, said):
    assert damage in TREE
    assert any(said in warning for warning in warned(TREE.replace(damage, by, 1))), warned(TREE.replace(damage, by, 1))


def test_damage_of_blocks_and_of_the_end_is_named():
    assert warned(TREE[:-1]) == (f"line 6: has no line end, so that it may be cut: {TREE.splitlines()[-1]!r}",)
    assert "line 1: b1 lists 4 nodes, BlockSize is 3" in warned(BLOCKS.replace("BlockSize=4", "BlockSize=3"))
    assert "line 2: BlockIndex=0 does not follow 0" in warned(BLOCKS.replace("BlockIndex=1", "BlockIndex=0"))
    assert "line 2: n4 is listed by b1, too" in warned(BLOCKS.replace("n[5-6]", "n[4-6]"))


def test_what_cannot_be_read_is_null():
    facts, _ = parse_slurm_topology(TREE.replace("Nodes=n[3-4]", "Nodes=n[3-4"))
    assert (facts["leaf_switches"]["leaf2"], facts["leaf_switches"]["leaf1"], facts["node_count"]) == (None, 2, None)
    facts, warnings = parse_slurm_topology(TREE.replace("Switches=leaf3", "Switches=core"))
    assert (facts["levels"], facts["roots"]) == (None, ["leaf3"]) and warnings


def test_a_deep_chain_is_read():
    chain = "".join(f"SwitchName=s{at} Switches=s{at + 1}\n" for at in range(5000)) + "SwitchName=s5000 Nodes=n1\n"
    assert parse_slurm_topology(chain)[0]["levels"] == 5001

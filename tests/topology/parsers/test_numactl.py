"""`numactl -H` and its damages; texts written here after its format."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.topology.parsers.numactl import answer_numactl, parse_numactl

TWO = """\
available: 3 nodes (0-1,8)
node 0 cpus: 0 1 2 3 8 9 10 11
node 0 size: 64000 MB
node 0 free: 60000 MB
node 1 cpus: 4 5 6 7 12 13 14 15
node 1 size: 64500 MB
node 1 free: 100 MB
node 8 cpus:
node 8 size: 16000 MB
node 8 free: 15999 MB
node distances:
node   0   1   8
  0:  10  21  80
  1:  21  10  40
  8:  80  40  10
"""


def test_nodes_with_and_without_processors():
    facts, warnings = answer_numactl(TWO)
    assert warnings == ()
    assert facts == {
        "available": 3,
        "node_ids": "0-1,8",
        "cpus_per_node": {"0": 8, "1": 8, "8": 0},
        "cpu_less_nodes": [8],
        "nodes": {
            "0": {"cpus": [0, 1, 2, 3, 8, 9, 10, 11], "size_mb": 64000},
            "1": {"cpus": [4, 5, 6, 7, 12, 13, 14, 15], "size_mb": 64500},
            "8": {"cpus": [], "size_mb": 16000},
        },
        "distances": [[10, 21, 80], [21, 10, 40], [80, 40, 10]],
    }


def test_one_node_without_distances_prefixes_and_windows_line_ends():
    text = "available: 1 nodes (0)\nnode 0 cpus: 0 1\nnode 0 size: 5 MB\nnode 0 free: 1 MB\n"
    facts, warnings = parse_numactl(text + "No distance information available.\n")
    assert (facts.node_count, facts.nodes[0].free_mib, facts.distances, warnings) == (1, 1, None, ())
    for prefix in ("node1: ", "3: ", "\x1b[0m", "2024-05-06T07:08:09Z "):
        assert answer_numactl("".join(f"{prefix}{line}\r\n" for line in TWO.splitlines())) == answer_numactl(TWO)


def test_a_host_without_numa():
    facts, warnings = parse_numactl("No NUMA available on this system\n")
    assert facts.nodes == {} and facts.node_count is None
    assert warnings == ("line 1: No NUMA available on this system",)


def test_a_line_wrap_goes_on_and_a_number_that_it_cut_is_put_together():
    for wrap in ("12 13 1\n4 15", "12 13 1       4 15"):
        facts, warnings = parse_numactl(TWO.replace("12 13 14 15", wrap))
        assert facts.nodes[1].cpus == (4, 5, 6, 7, 12, 13, 14, 15)
        assert "line 5: the processors of node 1 have a number cut in two, read as 14" in warnings


@pytest.mark.parametrize(
    ("old", "new", "said", "key"),
    [
        ("12 13 14 15", "12 13 15", "line 2: processors 14 are in no node", None),
        ("12 13 14 15", "12 13 14", "line 2: nodes differ in their number of processors: [7, 8]", None),
        ("12 13 14 15", "12 13 14 15 15", "line 5: the processors of node 1 do not ascend", ("nodes", "1", "cpus")),
        ("4 5 6 7", "3 4 5 6 7", "line 5: the processors of node 1 do not ascend or are another's", ("nodes", "0", "cpus")),
        ("4 5 6 7", "4 5 6 x", "line 5: the processors of node 1 do not ascend", ("cpus_per_node", "1")),
        ("size: 64500 MB", "size: 64500", "line 6: no memory in MB", ("nodes", "1", "size_mb")),
        ("free: 100 MB", "free: 64501 MB", "line 5: node 1 has more free memory", ("nodes", "1", "size_mb")),
        ("node 1 size: 64500 MB\n", "", "line 5: node 1 has no line size", ("nodes", "1", "size_mb")),
        ("node 1 size: 64500 MB\n", "node 1 size: 64500 MB\n" * 2, "line 7: size of node 1 stand in line 6, too", None),
        ("  1:  21  10  40", "  1:  21  10  41", "line 15: from node 8 to 1 it is 40, back 41", ("distances", 1, 2)),
        ("  1:  21  10  40", "  1:  21  10", "line 14: 2 distances of node 1 for 3 nodes", ("distances", 1, 0)),
        ("  1:  21  10  40", "  1:  10  21  40", "line 14: the distances of node 1 have not 10", ("distances", 1, 1)),
        ("  1:  21  10  40\n", "", "there is no row of distances of node 1", ("distances", 1, 0)),
        ("node distances:\n", "", "line 11: there is no line 'node distances:'", None),
        (TWO[TWO.index("node dist"):], "", "line 10: there are no distances", ("distances",)),
        ("available: 3", "available: 2", "line 1: 2 nodes (0-1,8), but lines of 0-1,8", None),
        ("available: 3 nodes (0-1,8)\n", "", "0 lines 'available:'", ("available",)),
        ("10\n", "10", "line 15: has no line end", ("distances", 2, 0)),
    ],
)  # fmt: skip
def test_damage_is_named_and_its_facts_are_unknown(old, new, said, key):
    assert old in TWO
    damaged = new.join(TWO.rsplit(old, 1)) if old == "10\n" else TWO.replace(old, new, 1)
    facts, warnings = answer_numactl(damaged)
    assert any(said in warning for warning in warnings), warnings
    for step in key or ():
        facts = facts[step]
    assert key is None or facts is None


@pytest.mark.parametrize("text", ["", "Hello\n", "node is a word\n"])
def test_what_is_no_numactl_is_refused(text):
    with pytest.raises(ToolkitError, match="nothing that numactl -H prints"):
        parse_numactl(text)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.integers(0, 30), st.text(max_size=5))
def test_no_damage_raises_anything_else(start, length, between):
    try:
        _, warnings = answer_numactl(TWO[:start] + between + TWO[start + length :])
    except ToolkitError:
        return
    assert all(warning.startswith("line ") for warning in warnings)

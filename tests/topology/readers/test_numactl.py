"""`numactl -H` in its forms; texts written here after its format."""

import pytest

from toolkit.errors import ToolkitError
from toolkit.topology.readers.numactl import answer_numactl

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
    facts, warnings = answer_numactl(text + "No distance information available.\n")
    assert (facts["available"], facts["nodes"]["0"]["size_mb"], facts["distances"], warnings) == (1, 5, None, ())
    for prefix in ("node1: ", "3: ", "\x1b[0m", "2024-05-06T07:08:09Z "):
        assert answer_numactl("".join(f"{prefix}{line}\r\n" for line in TWO.splitlines())) == answer_numactl(TWO)


def test_a_host_without_numa():
    facts, warnings = answer_numactl("No NUMA available on this system\n")
    assert facts["nodes"] == {} and facts["available"] is None
    assert warnings == ("line 1: No NUMA available on this system",)


@pytest.mark.parametrize("text", ["", "Hello\n", "node is a word\n"])
def test_what_is_no_numactl_is_refused(text):
    with pytest.raises(ToolkitError, match="expected the output of numactl -H"):
        answer_numactl(text)


@pytest.mark.parametrize(
    ("old", "new", "said", "key"),
    [
        ("12 13 14 15", "12 13 14 15 15", "line 5: expected ascending CPUs of node 1", ("nodes", "1", "cpus")),
        ("12 13 14 15", "12 13 1\n4 15", "line 5: expected ascending CPUs of node 1", ("nodes", "1", "cpus")),
        ("4 5 6 7", "3 4 5 6 7", "line 5: nodes 0 and 1 share CPUs", ("nodes", "0", "cpus")),
        ("size: 64500 MB", "size: 64500", "line 6: no size in MB for node 1", ("nodes", "1", "size_mb")),
        ("free: 100 MB", "free: 64501 MB", "line 5: the free memory of node 1 exceeds", ("nodes", "1", "size_mb")),
        (
            "  1:  21  10  40",
            "  1:  21  10  41",
            "line 15: distance 40 from node 8 to 1, but 41 back",
            ("distances", 1, 2),
        ),
        ("  1:  21  10  40", "  1:  21  10", "line 14: expected 3 distances of node 1, got 2", ("distances", 1, 0)),
        (
            "  1:  21  10  40",
            "  1:  10  21  40",
            "line 14: expected distance 10 from node 1 to itself",
            ("distances", 1, 1),
        ),
    ],
)
def test_a_damaged_line_gives_no_fact_and_is_named(old, new, said, key):
    assert old in TWO
    facts, (warning,) = answer_numactl(TWO.replace(old, new, 1))
    assert warning.startswith(said)
    for step in key:
        facts = facts[step]
    assert facts is None

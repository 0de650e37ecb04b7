"""Formats of two sources in our own samples: new and old drivers, damage, nonsense."""

from hypothesis import given
from hypothesis import strategies as st

from toolkit.topology.parsers.topology_address import parse_slurm_topology


def test_switch_path_needs_address_and_pattern_to_fit():
    path, _ = parse_slurm_topology("core.leaf[1-2].node7", "switch.switch.node")
    assert (path.levels, path.leaf, path.node) == (("core", "leaf[1-2]"), "leaf[1-2]", "node7")
    flat, _ = parse_slurm_topology("node7", "node")
    assert flat.leaf is None
    path, warnings = parse_slurm_topology("leaf1.node7.example.org", "switch.node")
    assert path is None and "4 parts" in warnings[0]


@given(st.text(max_size=40), st.text(max_size=40))
def test_other_damaged_input_never_raises(address, pattern):
    parse_slurm_topology(address, pattern)

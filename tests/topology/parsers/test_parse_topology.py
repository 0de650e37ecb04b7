"""Formats of the three sources in our own samples: new and old drivers, damage, nonsense."""

import re

from hypothesis import given
from hypothesis import strategies as st

from toolkit.topology.parsers.ibstat import parse_ibstat
from toolkit.topology.parsers.topology_address import parse_slurm_topology

IBSTAT = """CA 'mlx5_2'
\tCA type: MT4129
\tNumber of ports: 1
\tFirmware version: 28.1.2
\tPort 1:
\t\tState: Initializing
\t\tPhysical state: LinkUp
\t\tRate: 2.5
\t\tBase lid: 65535
\t\tSM lid: 0
\t\tLink layer: InfiniBand
"""


def test_a_port_is_active_only_when_a_subnet_manager_made_it_so():
    (adapter,), warnings = parse_ibstat(IBSTAT)
    (port,) = adapter.ports
    assert not warnings
    assert (port.active, port.rate_gb_per_s, port.base_lid) == (False, 2.5, 65535)
    assert parse_ibstat(IBSTAT.replace("Initializing", "Active"))[0][0].ports[0].active


def test_ibstat_damage_is_unknown_with_its_line():
    text = IBSTAT.replace("Rate: 2.5", "Rate: ?").replace("Number of ports: 1", "Number of ports: 2") + "..\n"
    (adapter,), warnings = parse_ibstat(text)
    assert adapter.ports[0].rate_gb_per_s is None
    assert [re.match(r"line \d+", warning)[0] for warning in warnings] == ["line 12", "line 1", "line 5"]
    assert parse_ibstat(re.sub(r"^\s+", "", IBSTAT, flags=re.M))[0] == parse_ibstat(IBSTAT)[0]


def test_switch_path_needs_address_and_pattern_to_fit():
    path, _ = parse_slurm_topology("core.leaf[1-2].node7", "switch.switch.node")
    assert (path.levels, path.leaf, path.node) == (("core", "leaf[1-2]"), "leaf[1-2]", "node7")
    flat, _ = parse_slurm_topology("node7", "node")
    assert flat.leaf is None
    path, warnings = parse_slurm_topology("leaf1.node7.example.org", "switch.node")
    assert path is None and "4 parts" in warnings[0]


@st.composite
def damaged(draw, text):
    """Cut, repeat, swap or overwrite parts of a right text."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 80)))
        text = text[:start] + draw(st.sampled_from(["", "X", "\t", "\n", "NV1", "²", text[start:end] * 2])) + text[end:]
    return text


@given(damaged(IBSTAT), st.text(max_size=40), st.text(max_size=40))
def test_other_damaged_input_never_raises(text, address, pattern):
    parse_ibstat(text)
    parse_slurm_topology(address, pattern)

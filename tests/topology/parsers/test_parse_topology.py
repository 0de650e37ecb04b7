"""Formats of the three sources in our own samples: new and old drivers, damage, nonsense."""

import re

from hypothesis import given
from hypothesis import strategies as st

from toolkit.topology import links
from toolkit.topology.parsers.ibstat import parse_ibstat
from toolkit.topology.parsers.nvidia_smi_topo import parse_nvidia_smi_topo
from toolkit.topology.parsers.topology_address import parse_slurm_topology

LEGEND = """
Legend:

  X    = Self
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node

NIC Legend:

  NIC0: mlx5_2
  NIC1: mlx5_bond_0
"""
TWO_PAIRS = (
    "\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV4\tSYS\tSYS\tNODE\tSYS\t0-7,16-23\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tSYS\tSYS\tPIX\tSYS\t0-7,16-23\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV4\tSYS\tPXB\t8-15,24-31\t1,3-5\t\t2\n"
    "GPU3\tSYS\tSYS\tNV4\t X \tSYS\tPXB\t8-15,24-31\t1,3-5\t\t2\n"
    "NIC0\tNODE\tPIX\tSYS\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tPXB\tPXB\tSYS\t X \t\t\t\t\n" + LEGEND
)
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


def test_matrix_names_devices_by_the_legend_and_keeps_affinity_lists():
    matrix, warnings = parse_nvidia_smi_topo(TWO_PAIRS)
    assert not warnings
    assert links.nvlink_cliques(matrix) == links.nvlink_components(matrix) == ((0, 1), (2, 3))
    assert links.summary(matrix) == "2x NV4, 4x SYS"
    nearest = [(found.level, found.nics) for found in links.nearest_nics(matrix)]
    assert nearest == [("NODE", ("mlx5_2",)), ("PIX", ("mlx5_2",)), *[("PXB", ("mlx5_bond_0",))] * 2]
    assert matrix.cpu_affinity[2] == "8-15,24-31"
    assert matrix.numa_affinity == ("0", "0", "1,3-5", "1,3-5")
    assert matrix.gpu_numa_id == ("N/A", "N/A", "2", "2")


def test_old_driver_without_numa_column_leaves_numa_unknown():
    text = "\tGPU0\tGPU1\tmlx4_0\tCPU Affinity\nGPU0\t X \tSOC\tPHB\t0-3\nGPU1\tSOC\t X \tSOC\t4-7\n"
    matrix, warnings = parse_nvidia_smi_topo(text)
    assert not warnings
    assert matrix.nics == ("mlx4_0",) and matrix.nic_devices == (None,)
    assert matrix.cpu_affinity == ("0-3", "4-7")
    assert matrix.numa_affinity == (None, None)
    assert links.nearest_nics(matrix)[0].nics == ("mlx4_0",)


def test_a_lost_tab_is_mended_and_a_lost_cell_makes_the_row_unknown():
    matrix, warnings = parse_nvidia_smi_topo(TWO_PAIRS.replace("NV4\tSYS\tSYS\tNODE", "NV4\tSYSSYS\tNODE"))
    assert warnings == ("line 2: row GPU0: cells run together in 'SYSSYS', read apart",)
    assert matrix.gpu_links == parse_nvidia_smi_topo(TWO_PAIRS)[0].gpu_links

    matrix, warnings = parse_nvidia_smi_topo(TWO_PAIRS.replace("GPU1\tNV4\t", "GPU1\t"))
    assert len(warnings) == 1 and warnings[0].startswith("line 3: row GPU1: 5 link cells for 6 columns")
    assert matrix.gpu_links[1] == (None,) * 4
    assert matrix.cpu_affinity[1] is None
    assert links.pair_counts(matrix) == {"NV4": 2, "SYS": 4}, "the other rows still tell of GPU1"


def test_contradicting_and_missing_rows_are_reported_not_guessed():
    matrix, warnings = parse_nvidia_smi_topo(TWO_PAIRS.replace("GPU1\tNV4", "GPU1\tNV2"))
    assert matrix.gpu_links[0][1] is matrix.gpu_links[1][0] is None
    assert any("GPU1 to GPU0 reads NV2, GPU0 to GPU1 reads NV4" in warning for warning in warnings)

    matrix, warnings = parse_nvidia_smi_topo(TWO_PAIRS[: TWO_PAIRS.index("GPU3\tSYS")])
    assert "no row for GPU3" in warnings
    assert matrix.gpus[3] == "GPU3" and matrix.gpu_links[3] == (None,) * 4

    matrix, warnings = parse_nvidia_smi_topo("Failed to initialize NVML: Driver/library version mismatch\n")
    assert matrix.gpus == () and warnings


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


@given(damaged(TWO_PAIRS))
def test_damaged_matrix_never_raises_nor_shifts_columns(text):
    matrix, _ = parse_nvidia_smi_topo(text)
    assert all(len(row) == len(matrix.gpus) for row in matrix.gpu_links)
    assert all(row[i] in ("X", None) for i, row in enumerate(matrix.gpu_links))
    links.nearest_nics(matrix), links.nvlink_cliques(matrix), links.nvlink_components(matrix)


@given(damaged(IBSTAT), st.text(max_size=40), st.text(max_size=40))
def test_other_damaged_input_never_raises(text, address, pattern):
    parse_ibstat(text)
    parse_slurm_topology(address, pattern)

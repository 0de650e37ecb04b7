"""`nvidia-smi topo -m` of new and old drivers, damaged and not."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology import links
from toolkit.topology.parsers.nvidia_smi_topo import parse_nvidia_smi_topo

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing the interconnect between NUMA nodes
  NODE = Connection traversing host bridges within a NUMA node
  PHB  = Connection traversing a host bridge
  PXB  = Connection traversing several bridges
  PIX  = Connection traversing one bridge at most
  NV#  = Connection traversing # NVLinks

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
OLD = "\tGPU0\tGPU1\tmlx4_0\tCPU Affinity\nGPU0\t X \tSOC\tPHB\t0-3\nGPU1\tSOC\t X \tSOC\t4-7\nmlx4_0\tPHB\tSOC\t X\n"


def answer(text):
    return links.answer_nvidia_smi_topo(text)


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
    matrix, warnings = parse_nvidia_smi_topo(OLD)
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


def test_what_cannot_be_told_of_a_damaged_matrix_is_null():
    facts, warnings = answer(TWO_PAIRS.replace("GPU1\tNV4", "GPU1\tNV2"))
    assert "line 2: GPU0 to GPU1 reads NV4, GPU1 to GPU0 in line 3 reads NV2: both ignored" in warnings
    assert facts["gpu_pair_link_counts"] is facts["nvlink_maximal_cliques"] is facts["one_nvlink_clique"] is None
    assert facts["closest_nics"]["GPU0"] == {"level": "NODE", "nics": ["mlx5_2"]}

    facts, warnings = answer(TWO_PAIRS.replace("GPU1\tNV4\t X \tSYS\tSYS\tPIX", "GPU1\tNV4\t X \tSYS\tSYS\tPXB"))
    assert any("GPU1 to NIC0 reads PXB, NIC0 to GPU1 in line 6 reads PIX" in warning for warning in warnings)
    assert facts["closest_nics"]["GPU1"] is None and facts["gpu_pair_link_counts"] == {"NV4": 2, "SYS": 4}

    facts, warnings = answer(TWO_PAIRS[: TWO_PAIRS.index("GPU3\tSYS")])
    assert "line 1: no row for GPU3" in warnings
    assert facts["gpu_count"] == 4 and facts["gpu_cpu_affinity"]["GPU3"] is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("GPU1\tGPU2\tGPU3", "GPU1\tGPU2\tGP3", "line 1: header: 'GP3' is no device"),
        ("CPU Affinity\t", "", "line 1: header: the titles behind the devices are"),
        ("GPU2\tGPU3\tNIC0", "GPU3\tGPU2\tNIC0", "line 1: header: GPUs are numbered [0, 1, 3, 2]"),
        ("NIC0\tNODE\tPIX\tSYS\tSYS\t X \tSYS\t\t\t\t\n", "", "line 1: no row for NIC0"),
        ("GPU1\tNV4", "GPU0\tNV4", "line 3: a second row GPU0, ignored"),
        (
            "0-7,16-23\t0\t\tN/A\nGPU1",
            "0-7,16\t0\t\tN/A\nGPU1",
            "line 3: CPUAffinity 0-7,16-23 overlaps 0-7,16 of line 2",
        ),
        ("1,3-5\t\t2\nNIC0", "2\t\t1,3-5\nNIC0", "line 5: row GPU3: '1,3-5' is no GPU NUMA ID"),
        ("0\t\tN/A\nGPU1", "N/A\t\t0\nGPU1", "line 2: row GPU0: a GPU NUMA ID without a NUMA affinity"),
        ("0-7,16-23\t0\t\tN/A\nGPU1", "16-23,0-7\t0\t\tN/A\nGPU1", "line 2: row GPU0: 3 affinity cells"),
        ("  PXB  = Connection traversing several bridges\n", "", "line 9: the legend lacks PXB"),
        ("  NIC1: mlx5_bond_0\n", "", "line 19: the NIC legend lacks NIC1"),
        ("NIC1: mlx5_bond_0", "NIC1: mlx5_2", "line 22: NIC1 or mlx5_2 stands in the NIC legend twice"),
        ("\n  NODE =", "  NODE =", "line 12: two lines of the legend in one"),
        ("Legend:\n\n  X", "\n\n  X", "a legend without its title"),
        ("  NIC0: mlx5_2", "  NI: mlx5_2", "line 21: no row and no legend: 'NI: mlx5_2'"),
    ],
)
def test_damage_is_named_with_its_line(old, new, said):
    assert old in TWO_PAIRS
    _, warnings = parse_nvidia_smi_topo(TWO_PAIRS.replace(old, new, 1))
    assert any(warning.startswith(said) or said in warning for warning in warnings), warnings
    assert all(re.match(r"line [0-9]+: ", warning) for warning in warnings)


def test_rows_out_of_order_and_a_second_matrix_are_named():
    lines = OLD.splitlines(keepends=True)
    swapped = parse_nvidia_smi_topo("".join([lines[0], lines[2], lines[1], lines[3]]))
    assert swapped[1] == ("line 1: rows do not follow in the order of the columns: GPU1, GPU0, mlx4_0",)
    twice, warnings = parse_nvidia_smi_topo(OLD + OLD)
    assert warnings == ("line 5: a second matrix, not read",) and len(twice.gpus) == 2


def test_a_value_at_the_cut_is_not_believed():
    facts, warnings = answer(OLD[: OLD.index("4-7") + 1])
    assert facts["gpu_cpu_affinity"] == {"GPU0": "0-3", "GPU1": None}
    assert any("'4' may be cut" in warning for warning in warnings)
    assert answer(TWO_PAIRS[: TWO_PAIRS.index("bond_0")])[0]["nic_legend"] == {"NIC0": "mlx5_2"}


def test_a_log_and_a_terminal_add_nothing():
    plain = answer(TWO_PAIRS)
    assert answer("".join(f"node1: {line}\n" for line in TWO_PAIRS.splitlines())) == plain
    assert answer(TWO_PAIRS.replace("\n", "\r\n")) == plain
    assert answer("$ nvidia-smi topo -m\n" + TWO_PAIRS)[0] == plain[0]


def test_large_machines_and_none():
    names = [f"GPU{number}" for number in range(72)]
    rows = [[name, *(" X " if name == other else "NV18" for other in names), "0-71", "0"] for name in names]
    text = (
        "\t".join(["", *names, "CPU Affinity", "NUMA Affinity"]) + "\n" + "".join("\t".join(row) + "\n" for row in rows)
    )
    facts, warnings = answer(text)
    assert not warnings and facts["gpu_link_summary"] == "all NV18" and facts["one_nvlink_clique"] is True
    facts, _ = answer("No devices were found\n")
    assert (facts["gpu_count"], facts["one_nvlink_clique"], facts["closest_nics"]) == (0, False, {})
    with pytest.raises(CheckFailedError, match="no header with GPU columns: 'Failed to initialize NVML"):
        parse_nvidia_smi_topo("Failed to initialize NVML: Driver/library version mismatch\n")


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
    try:
        matrix, _ = parse_nvidia_smi_topo(text)
    except CheckFailedError:
        return
    assert all(len(row) == len(matrix.gpus) for row in matrix.gpu_links)
    assert all(row[i] in ("X", None) for i, row in enumerate(matrix.gpu_links))
    answer(text)

"""`nvidia-smi topo -m` of new and old drivers, damaged and not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology.links import matrix as links
from toolkit.topology.readers.nvidia_smi_topo import parse_nvidia_smi_topo

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


def test_a_row_that_does_not_fit_leaves_its_links_to_the_rows_of_the_other_devices():
    whole, _ = parse_nvidia_smi_topo(TWO_PAIRS)
    for damaged in (
        TWO_PAIRS.replace("NV4\tSYS\tSYS\tNODE", "NV4\tSYSSYS\tNODE"),
        TWO_PAIRS.replace("GPU0\t X \t", "GPU0\t"),
    ):
        matrix, warnings = parse_nvidia_smi_topo(damaged)
        assert warnings == ("line 2: row GPU0: 5 link cells do not match 6 columns",)
        assert (matrix.gpu_links[0][1:], matrix.nic_links) == (whole.gpu_links[0][1:], whole.nic_links)
        assert matrix.cpu_affinity == whole.cpu_affinity


def test_unknown_links_and_what_follows_from_them():
    facts, warnings = answer(TWO_PAIRS.replace("GPU1\tNV4", "GPU1\tNV2"))
    assert warnings == ("line 1: GPU0 to GPU1 is NV4, but GPU1 to GPU0 is NV2; both are ignored",)
    assert facts["gpu_pair_link_counts"] is facts["nvlink_maximal_cliques"] is facts["one_nvlink_clique"] is None
    assert facts["closest_nics"]["GPU0"] == {"level": "NODE", "nics": ["mlx5_2"]}

    facts, _ = answer(TWO_PAIRS.replace("GPU1\tNV4\t X \tSYS\tSYS\tPIX", "GPU1\tNV4\t X \tSYS\tSYS\tPXB"))
    assert facts["closest_nics"]["GPU1"] is None and facts["gpu_pair_link_counts"] == {"NV4": 2, "SYS": 4}

    facts, warnings = answer(TWO_PAIRS[: TWO_PAIRS.index("GPU3\tSYS")])
    assert warnings[0].startswith("line 1: no row for GPU3")
    assert facts["gpu_count"] == 4 and facts["gpu_cpu_affinity"]["GPU3"] is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0-7,16-23\t0\t\tN/A\nGPU1", "0\t0-7,16-23\t\tN/A\nGPU1"),  # exchanged
        ("0-7,16-23\t0\t\tN/A\nGPU1", "N/A\t0\t\tN/A\nGPU1"),
        ("0-7,16-23\t0\t\tN/A\nGPU1", "0-7,16-23\tN/A\t\t0\nGPU1"),
        ("0-7,16-23\t0\t\tN/A\nGPU1", "16-23,0-7\t0\t\tN/A\nGPU1"),
        ("0-7,16-23\t0\t\tN/A\nGPU1", "0-7,16- 23\t0\t\tN/A\nGPU1"),
    ],
)
def test_affinities_that_cannot_be_are_unknown(old, new):
    assert old in TWO_PAIRS
    matrix, (warning,) = parse_nvidia_smi_topo(TWO_PAIRS.replace(old, new, 1))
    assert warning.startswith("line 2: row GPU0: expected 3 affinities, got")
    assert matrix.cpu_affinity[:2] == (None, "0-7,16-23") and matrix.numa_affinity[:2] == (None, "0")
    assert matrix.gpu_links == parse_nvidia_smi_topo(TWO_PAIRS)[0].gpu_links


@pytest.mark.parametrize(
    ("old", "new"),
    [("GPU1\tGPU2\tGPU3", "GPU1\tGPU2\tGP3"), ("GPU2\tGPU3\tNIC0", "GPU3\tGPU2\tNIC0"), ("NIC1\tCPU", "CPU")],
)
def test_a_damaged_header_is_refused(old, new):
    with pytest.raises(CheckFailedError) as error:
        parse_nvidia_smi_topo(TWO_PAIRS.replace(old, new, 1))
    assert error.value.where.startswith("line ")


def test_the_legend_names_devices_or_says_which_it_lacks():
    facts, (warning,) = answer(TWO_PAIRS.replace("  NIC1: mlx5_bond_0\n", ""))
    assert facts["nic_legend"] == {"NIC0": "mlx5_2"} and "the NIC legend lacks NIC1" in warning
    facts, (warning,) = answer(TWO_PAIRS.replace("NIC1: mlx5_bond_0", "NIC1: mlx5_2"))
    assert facts["nic_legend"] == {} and "line 22: NIC1 or mlx5_2 has another meaning" in warning
    assert answer(TWO_PAIRS[: TWO_PAIRS.index("bond_0")])[0]["nic_legend"] == {"NIC0": "mlx5_2"}


def test_a_second_matrix_is_not_read():
    twice, warnings = parse_nvidia_smi_topo(OLD + OLD)
    assert warnings == ("line 5: a second matrix, which is ignored",) and len(twice.gpus) == 2


def test_a_log_and_a_terminal_add_nothing():
    plain = answer(TWO_PAIRS)
    assert answer("".join(f"node1: {line}\n" for line in TWO_PAIRS.splitlines())) == plain
    assert answer(TWO_PAIRS.replace("\n", "\r\n")) == plain
    assert answer("$ nvidia-smi topo -m\n" + TWO_PAIRS)[0] == plain[0]


@pytest.mark.parametrize("escape", ["", "^[", "\\033"])
def test_a_header_whose_escape_character_was_lost_is_read(escape):
    assert answer(TWO_PAIRS.replace("\x1b", escape)) == answer(TWO_PAIRS)


PCIE_ONLY = TWO_PAIRS.replace("NV4", "PIX").replace("  NV#  = Connection traversing # NVLinks\n", "")


def test_a_pcie_only_matrix_leaves_nvlinks_unknown_and_says_so():
    facts, (warning,) = answer(PCIE_ONLY)
    assert warning == "line 1: this is topo -mp, which shows no NVLinks; use topo -m"
    unknown = ("gpu_pair_link_counts", "one_nvlink_clique", "nvlink_maximal_cliques", "nvlink_components")
    assert {facts[key] for key in unknown} == {None}
    assert facts["closest_nics"]["GPU1"] == {"level": "PIX", "nics": ["mlx5_2"]} and facts["gpu_count"] == 4

    typed = "$ nvidia-smi topo -mp\n" + PCIE_ONLY[: PCIE_ONLY.index("\nLegend")]  # copied without the legend
    assert answer(typed)[0]["one_nvlink_clique"] is None


def test_a_machine_without_nvlinks_has_no_clique():
    whole = TWO_PAIRS.replace("NV4", "PIX")
    assert answer(whole)[1] == () and answer(whole)[0]["one_nvlink_clique"] is False
    assert answer(OLD)[0]["one_nvlink_clique"] is False  # drivers without a legend


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
    with pytest.raises(
        CheckFailedError, match="expected the output of nvidia-smi topo -m, got 'Failed to initialize NVML"
    ):
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

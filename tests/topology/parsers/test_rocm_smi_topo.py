"""`rocm-smi --showtopo` and its parts: links, NUMA nodes, damaged tables."""

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.rocm_smi_topo import answer_rocm_smi_topo, parse_rocm_smi_topo

BEGIN = " ROCm System Management Interface ".center(80, "=") + "\n"
END = " End of ROCm SMI Log ".center(80, "=") + "\n"
TYPES = """================ Link Type between two GPUs ================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         PCIE
GPU1   XGMI         0            PCIE
GPU2   PCIE         PCIE         0

"""
NUMA = "======== Numa Nodes ========\n" + "".join(
    f"GPU[{gpu}]\t\t: (Topology) Numa {what}: {node}\n"
    for gpu, node in ((0, 4), (1, 4), (2, 6))
    for what in ("Node", "Affinity")
)
ALL = BEGIN + TYPES + NUMA + END


def test_links_and_numa_nodes():
    facts, warnings = answer_rocm_smi_topo(ALL)
    assert not warnings
    assert facts == {"gpu_count": 3, "link_summary": "2x PCIE, 1x XGMI", "numa": [4, 4, 6], "one_xgmi_clique": False}
    assert answer_rocm_smi_topo(ALL.replace("PCIE", "XGMI"))[0]["one_xgmi_clique"] is True
    assert parse_rocm_smi_topo(ALL)[0].links == {(0, 1): "XGMI", (0, 2): "PCIE", (1, 2): "PCIE"}


def test_what_a_flag_leaves_out_is_null():
    facts, warnings = answer_rocm_smi_topo(BEGIN + NUMA + END)
    assert not warnings
    assert facts == {"gpu_count": 3, "link_summary": None, "numa": [4, 4, 6], "one_xgmi_clique": None}
    assert answer_rocm_smi_topo(BEGIN + TYPES + END)[0]["numa"] is None
    one = "== Link Type between two GPUs ==\n       GPU0         \nGPU0   0            \n"
    assert answer_rocm_smi_topo(BEGIN + one + END)[0]["link_summary"] == "single GPU, no pairs"


def test_drivers_talk_and_other_tables_change_nothing():
    access = "== Link accessibility between two GPUs ==\n       GPU0  GPU1  GPU2\n"
    access += "".join(f"GPU{gpu}   True  True  True\n" for gpu in range(3))
    talk = "WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status\n\n"
    assert answer_rocm_smi_topo(BEGIN + talk + access + TYPES + NUMA + END) == answer_rocm_smi_topo(ALL)
    assert answer_rocm_smi_topo("".join(f"x1000c0: {line}\n" for line in ALL.splitlines())) == answer_rocm_smi_topo(ALL)
    unknown = answer_rocm_smi_topo(ALL.replace(": 6", ": -1"))
    assert unknown[0]["numa"] == [4, 4, -1] and not unknown[1]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("GPU1   XGMI", "GPU1   PCIE", "line 5: GPU1 to GPU0 reads PCIE, the other way XGMI: both ignored"),
        ("GPU1   XGMI         0 ", "GPU1   XGMI         ", "line 5: row GPU1: 2 cells for 3 columns, row ignored"),
        (
            "GPU1   XGMI         0            PCIE",
            "GPU1   0            XGMI         PCIE",
            "line 5: row GPU1: 'XGMI' to itself",
        ),
        ("GPU1   XGMI", "GPU1   15  ", "line 5: row GPU1: cells that do not belong"),
        ("GPU1   XGMI", "GPU0   XGMI", "line 5: a second row GPU0, ignored"),
        ("       GPU0         GPU1         GPU2\n", "", "has no header"),
        ("GPU2   PCIE         PCIE         0\n", "", "line 2: 'Link Type between two GPUs': the rows are GPU0, GPU1"),
        ("Numa Affinity: 6", "Numa Affinity: ", "line 14: no part of a table"),
        (
            "Node: 6\nGPU[2]\t\t: (Topology) Numa Affinity",
            "Affinity: 6\nGPU[2]\t\t: (Topology) Numa Node",
            "line 14: Numa Node of GPU 2 out",
        ),
        ("GPU[1]\t\t: (Topology) Numa Node: 4\n", "", "line 8: not every GPU has its NUMA node and affinity"),
        ("======== Numa Nodes ========\n", "", "line 8: lines of NUMA without their title"),
        ("Numa Node: 4\nGPU[1]\t\t: (Topology) Numa A", "Numa Node: 5\nGPU[0]\t\t: (Topology) Numa A", "a second time"),
        (END, "", "is not there, so that the text may be cut"),
        (BEGIN, "", "line 1: the line 'ROCm System Management Interface' is not there"),
    ],
)
def test_damage_is_named_with_its_line(old, new, said):
    assert old in ALL
    _, warnings = answer_rocm_smi_topo(ALL.replace(old, new, 1))
    assert any(said in warning for warning in warnings), warnings


def test_what_a_damaged_row_hid_is_null_unless_its_mirror_tells():
    facts, _ = answer_rocm_smi_topo(ALL.replace("GPU2   PCIE         PCIE         0", "GPU2   PCIE         PCIE"))
    assert facts["link_summary"] == "2x PCIE, 1x XGMI"
    facts, _ = answer_rocm_smi_topo(ALL.replace("GPU1   XGMI", "GPU1   PCIE"))
    assert (facts["gpu_count"], facts["link_summary"], facts["one_xgmi_clique"]) == (3, None, None)
    assert answer_rocm_smi_topo(ALL.replace("Node: 6", "Node: ?"))[0]["numa"] == [4, 4, None]
    assert answer_rocm_smi_topo((BEGIN + NUMA)[: -len("GPU[2]\t\t: (Topology) Numa Affinity: 6\n") - 1])[0]["numa"] == [
        4,
        4,
        None,
    ]


def test_no_devices_and_other_texts():
    assert answer_rocm_smi_topo(BEGIN + "WARNING: No AMD GPUs specified\n" + END)[0]["gpu_count"] == 0
    for text in ("Hello\n", "ERROR:root:Driver not initialized (amdgpu not found in modules)\n", ""):
        with pytest.raises(CheckFailedError, match="no table of rocm-smi's"):
            answer_rocm_smi_topo(text)


@given(st.text(alphabet="GPU[]01 :=Numa\nXI", max_size=60), st.integers(0, len(ALL)))
def test_nonsense_in_between_never_raises(text, place):
    answer_rocm_smi_topo(BEGIN + ALL[:place] + text + ALL[place:])


def test_long_words_are_read_in_no_time():
    began = time.monotonic()
    for text in ("=" * 20_000 + "x", "= " + " " * 20_000 + "x", BEGIN + TYPES + "GPU" + "9" * 5000 + "\n"):
        with contextlib.suppress(CheckFailedError):
            answer_rocm_smi_topo(text)
    assert time.monotonic() - began < 1

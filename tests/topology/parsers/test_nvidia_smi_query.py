"""`nvidia-smi --query-gpu=... --format=csv`, with and without header and units, damaged and not."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.nvidia_smi_query import answer_nvidia_smi_query
from toolkit.topology.parsers.query_fields import FIELDS, fits, form_of, nearest_field

HEAD = "index, name, pci.bus_id, driver_version, memory.total [MiB]\n"
ROWS = "".join(
    f"{gpu}, NVIDIA A30, 00000000:{bus}:00.0, 550.90.07, 24576 MiB\n" for gpu, bus in enumerate(("17", "65", "CA"))
)
TABLE = HEAD + ROWS


def test_columns_and_rows_are_as_printed():
    facts, warnings = answer_nvidia_smi_query(TABLE)
    assert not warnings
    assert facts["columns"] == ["index", "name", "pci.bus_id", "driver_version", "memory.total [MiB]"]
    assert facts["gpu_count"] == 3
    assert facts["rows"][2] == ["2", "NVIDIA A30", "00000000:CA:00.0", "550.90.07", "24576 MiB"]


def test_equal_rows_without_an_index_are_gpus_of_their_own():
    text = "name, compute_cap\n" + "NVIDIA A30, 8.0\n" * 4
    assert answer_nvidia_smi_query(text)[0]["gpu_count"] == 4
    assert answer_nvidia_smi_query(text)[1] == ()


def test_other_forms_of_the_table():
    nounits = TABLE.replace(" MiB", "")
    assert answer_nvidia_smi_query(nounits)[0]["rows"][0][-1] == "24576" and not answer_nvidia_smi_query(nounits)[1]
    facts, warnings = answer_nvidia_smi_query(ROWS)
    assert (facts["columns"], facts["gpu_count"], len(warnings)) == (None, 3, 1) and "line 1: no header" in warnings[0]
    assert answer_nvidia_smi_query("1234\n5678\n")[0]["gpu_count"] == 2  # noheader,nounits of one field
    for unknown in ("[N/A]", "[Not Supported]", "[Unknown Error]", "N/A"):
        assert answer_nvidia_smi_query(TABLE.replace("24576 MiB", unknown, 1))[1] == ()
    assert answer_nvidia_smi_query("".join(f"n1: {line}\n" for line in TABLE.splitlines())) == answer_nvidia_smi_query(
        TABLE
    )
    assert answer_nvidia_smi_query(TABLE.replace("\n", "\r\n")) == answer_nvidia_smi_query(TABLE)
    assert answer_nvidia_smi_query(TABLE.replace(", ", ","))[0] == answer_nvidia_smi_query(TABLE)[0]
    assert answer_nvidia_smi_query("No devices were found\n") == ({"columns": None, "gpu_count": 0, "rows": []}, ())


def test_a_field_of_a_new_driver_is_read_as_any_other():
    text = "name, warp_core.temperature\nNVIDIA A30, 7\n"
    assert answer_nvidia_smi_query(text) == (
        {"columns": ["name", "warp_core.temperature"], "gpu_count": 1, "rows": [["NVIDIA A30", "7"]]},
        (),
    )


def test_a_repeated_query_counts_each_gpu_once():
    facts, warnings = answer_nvidia_smi_query(HEAD + ROWS + ROWS)
    assert (facts["gpu_count"], len(facts["rows"])) == (3, 6)
    assert "line 5: index '0' a second time, also in line 2" in warnings


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("1, NVIDIA A30, ", "1, ", "line 3: 4 cells under 5 columns"),
        ("1, NVIDIA A30", "1, NVIDIA A3", "line 3: 'NVIDIA A3' may be a damaged 'NVIDIA A30'"),
        ("1, NVIDIA A30", "1, 550.90.07", "line 3: '550.90.07' cannot be name"),
        (
            "1, NVIDIA A30, 00000000:65:00.0",
            "1, NVIDIA A30, 0000000:65:00.0",
            "line 3: '0000000:65:00.0' cannot be pci.bus_id",
        ),
        ("65:00.0, 550.90.07", "65:00.0, 550.90.7", "line 3: '550.90.7' cannot be driver_version"),
        ("65:00.0, 550.90.07", "65:00.0, 550.90.01", "line 3: driver_version '550.90.01', other rows say '550.90.07'"),
        (
            "65:00.0, 550.90.07, 24576 MiB",
            "65:00.0, 550.90.07, 24576 Mi",
            "line 3: '24576 Mi' cannot be memory.total [MiB]",
        ),
        (
            "1, NVIDIA A30, 00000000:65",
            "1, NVIDIA A30, 00000000:17",
            "line 3: pci.bus_id '00000000:17:00.0' a second time",
        ),
        (
            "1, NVIDIA A30, 00000000:65:00.0, 550.90.07, 24576 MiB\n",
            "",
            "line 2: the index runs [0, 2], not one by one",
        ),
        ("0, NVIDIA A30, 00000000:17:00.0, 550.90.07, 24576 MiB\n", "", "line 2: the index begins at 1"),
        ("pci.bus_id", "pci.bu_id", "line 1: 'pci.bu_id' is no field that is known, and may be a damaged 'pci.bus_id'"),
        ("[MiB]", "[iB]", "line 1: 'memory.total [iB]': memory.total is told in MiB"),
        ("1, NVIDIA", "1,NVIDIA", "line 3: a comma without a blank"),
        (ROWS, "", "line 1: a header without rows"),
        (ROWS, ROWS + HEAD, "line 5: the header a second time"),
        (HEAD, "Mon Mar 10\n" + HEAD, "line 1: before the header: 'Mon Mar 10'"),
    ],
)
def test_damage_is_named_with_its_line(old, new, said):
    assert old in TABLE
    _, warnings = answer_nvidia_smi_query(TABLE.replace(old, new, 1))
    assert any(warning.startswith(said) for warning in warnings), warnings


def test_what_is_damaged_is_null():
    facts, _ = answer_nvidia_smi_query(TABLE.replace("1, NVIDIA A30, ", "1, "))
    assert facts["rows"][1] is None and facts["gpu_count"] == 3
    facts, _ = answer_nvidia_smi_query(TABLE.replace("65:00.0, 550.90.07", "65:00.0, 550.9"))
    assert facts["rows"][1] == ["1", "NVIDIA A30", "00000000:65:00.0", None, "24576 MiB"]


@pytest.mark.parametrize(("last", "read"), [("24576 MiB", True), ("[N/A]", True), ("2457", False)])
def test_a_last_cell_without_a_line_end_counts_where_it_is_whole(last, read):
    facts, warnings = answer_nvidia_smi_query(HEAD + f"0, NVIDIA A30, 00000000:17:00.0, 550.90.07, {last}")
    assert facts["rows"][0][-1] == (last if read else None) and warnings


def test_other_texts_are_refused():
    for text in (
        "Hello, there\n",
        "",
        'Field "nam" is not a valid field to query.\n',
        "Failed to initialize NVML: Unknown Error\n",
    ):
        with pytest.raises(CheckFailedError, match="no header of fields, and no row of a GPU"):
            answer_nvidia_smi_query(text)


def test_fields_know_their_values():
    assert fits("pstate", "P8") and not fits("pstate", "8")
    assert fits("pcie.link.width.max", "16") and not fits("pcie.link.gen.max", "16")
    assert form_of("GPU-01234567-89ab-cdef-0123-456789abcdef") == "uuid" and form_of("NVIDIA A30") is None
    assert nearest_field("utilzation.gpu") == "utilization.gpu" and nearest_field("warp_core") is None
    assert all(form[:1] != "=" or not fits(name, "\n") for name, form in FIELDS.items())


@given(st.text(max_size=60), st.integers(0, len(TABLE)))
def test_nonsense_in_between_never_raises_another_error(text, place):
    with contextlib.suppress(CheckFailedError):
        answer_nvidia_smi_query(TABLE[:place] + text + TABLE[place:])
        answer_nvidia_smi_query(text)

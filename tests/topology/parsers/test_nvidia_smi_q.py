"""`nvidia-smi -q`: drivers, MIG, processes, parts (-d) and damage; the long text is our own sample."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.nvidia_smi_q import answer_nvidia_smi_q, parse_nvidia_smi_q

TWO = (Path(__file__).parent / "samples" / "nvidia-smi-q.txt").read_text()  # an A30 with MIG, and one with a process
ECC_ALONE = """==============NVSMI LOG==============

Timestamp                                 : Mon Mar 10 09:15:00 2025
Driver Version                            : 550.90.07
CUDA Version                              : 12.4

Attached GPUs                             : 1
GPU 00000000:4B:00.0
    ECC Mode
        Current                           : Disabled
        Pending                           : Disabled
"""


def test_facts_of_two_gpus():
    facts, warnings = answer_nvidia_smi_q(TWO)
    assert not warnings
    assert facts == {
        "driver": "550.90.07",
        "cuda": "12.4",
        "attached_gpus": 2,
        "gpu_blocks": 2,
        "bus_ids": ["00000000:4B:00.0", "00000000:B1:00.0"],
        "product_names": ["NVIDIA A30"],
        "fabric_state": ["N/A"],
        "mig_current": ["Enabled", "Disabled"],
        "ecc_current": ["Enabled"],
    }
    query, _ = parse_nvidia_smi_q(TWO)
    assert [gpu.mig_mode for gpu in query.gpus] == ["Enabled", "Disabled"]
    assert len({gpu.uuid for gpu in query.gpus}) == 2


def test_a_part_and_other_drivers_words():
    facts, warnings = answer_nvidia_smi_q(ECC_ALONE)
    assert not warnings
    assert (facts["product_names"], facts["mig_current"], facts["ecc_current"]) == ([], [], ["Disabled"])
    old = ECC_ALONE.replace("ECC Mode", "Ecc Mode").replace("CUDA Version                              : 12.4\n", "")
    assert answer_nvidia_smi_q(old) == (facts | {"cuda": None}, ())
    new = ECC_ALONE.replace("Driver Version", "KMD Version   ").replace("CUDA Version    ", "CUDA UMD Version")
    assert answer_nvidia_smi_q(new) == (facts, ())
    without_library = answer_nvidia_smi_q(ECC_ALONE.replace("12.4", "Not Found"))
    assert without_library == (facts | {"cuda": "Not Found"}, ())


def test_logs_windows_and_lost_indentation_change_no_fact():
    plain, _ = answer_nvidia_smi_q(TWO)
    assert answer_nvidia_smi_q(TWO.replace("\n", "\r\n")) == (plain, ())
    assert answer_nvidia_smi_q("".join(f"gpu-07: {line}\n" for line in TWO.splitlines())) == (plain, ())
    assert answer_nvidia_smi_q(re.sub("^ +", "", ECC_ALONE, flags=re.M))[0] == answer_nvidia_smi_q(ECC_ALONE)[0]


def line_of(text, words):
    return text[: text.index(words)].count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "Attached GPUs                             : 2",
            "Attached GPUs                             : 8",
            "8 GPUs are attached, 2 are printed",
        ),
        (
            "Bus Id                            : 00000000:4B",
            "Bus Id                            : 00000000:B1",
            "Bus Id '00000000:B1:00.0' of the GPU 00000000:4B:00.0",
        ),
        (
            "Bus                               : 0x4B",
            "Bus                               : 0x4",
            "Bus '0x4' of the GPU 00000000:4B:00.0",
        ),
        ("GPU 00000000:B1:00.0\n", "GPU 00000000:B1:0.0\n", "no whole bus id: 'GPU 00000000:B1:0.0'"),
        ("GPU 00000000:B1:00.0\n", "", "Product Name a second time"),
        ("GPU 00000000:B1:00.0\n", "GPU 00000000:4B:00.0\n", "a second GPU at 00000000:4B:00.0"),
        (
            "    Compute Mode                          : Default\n",
            "",
            "unlike the other GPUs of its kind it lacks Compute Mode",
        ),
        ("        SM                                : 210 MHz\n", "", "Clocks lacks SM"),
        ("    MIG Mode\n", "", "the GPU is printed without MIG Mode"),
        ("    Fabric\n        State", "    Fabric\n        Stat ", "Fabric of the GPU has no State"),
        (
            "Current                           : Disabled",
            "Current                           : Disable",
            "'Disable' is no MIG Mode, Current",
        ),
        (
            "Product Name                          : NVIDIA A30",
            "Product Name                         : NVIDIA A30",
            "its colon is not below the others'",
        ),
        (
            "Fan Speed                             : N/A\n",
            "Fan Speed                             : N/A",
            "two lines in one: Fan Speed",
        ),
        ("    PCI\n", "    PCI\n    PCI\n", "PCI stands there 2 times"),
        ("        Bus  ", "          Bus", "indented by 10"),
        (
            "GSP Firmware Version                  : 550.90.07",
            "GSP Firmware Version                  : 550.90.0",
            "firmware 550.90.0 under driver 550.90.07",
        ),
        (
            "Driver Version                            : 550",
            "Driver Version                            : ",
            "no version of a driver",
        ),
        ("==============NVSMI LOG==============\n", "", "the line NVSMI LOG is not there"),
        ("Timestamp  ", "Timestam   ", "line 1: Timestamp is not there"),
    ],
)
def test_damage_is_named_with_its_line(old, new, said):
    assert old in TWO
    _, warnings = answer_nvidia_smi_q(TWO.replace(old, new, 1))
    assert any(said in warning for warning in warnings), warnings
    assert all(re.match("line [0-9]+: ", warning) for warning in warnings)


def test_the_line_is_the_damaged_one_and_its_fact_is_null():
    text = TWO.replace("Current                           : Disabled", "Current                           : Disab")
    facts, warnings = answer_nvidia_smi_q(text)
    assert facts["mig_current"] == ["Enabled"]
    assert any(
        warning.startswith(f"line {line_of(text, 'Disab' + chr(10))}: 'Disab' is no MIG Mode") for warning in warnings
    )
    facts, _ = answer_nvidia_smi_q(TWO.replace("GPU 00000000:B1:00.0\n", "GPU 00000000:B1:00\n"))
    assert (facts["gpu_blocks"], facts["bus_ids"]) == (2, ["00000000:4B:00.0", None])


def test_a_text_that_ends_early_is_named():
    cut = TWO[: TWO.rindex("    Processes")]
    _, warnings = answer_nvidia_smi_q(cut)
    assert any("the GPU is printed without Processes" in warning for warning in warnings)
    _, warnings = answer_nvidia_smi_q(cut[:-5])
    assert any("has no line end" in warning for warning in warnings)


def test_no_devices_and_other_texts():
    assert answer_nvidia_smi_q("No devices were found\n")[0]["gpu_blocks"] == 0
    for text in (
        "Hello\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        "GPU 0: A30\n",
        "",
    ):
        with pytest.raises(CheckFailedError, match="neither a log of nvidia-smi's nor a GPU"):
            answer_nvidia_smi_q(text)
    with pytest.raises(CheckFailedError, match="this is XML"):
        answer_nvidia_smi_q('<?xml version="1.0" ?>\n<nvidia_smi_log>\n')


@given(st.text(alphabet="GPU 0:.\n =MIGode", max_size=60), st.integers(0, len(ECC_ALONE)))
def test_nonsense_in_between_never_raises(text, place):
    answer_nvidia_smi_q("GPU 00000000:01:00.0\n" + ECC_ALONE[:place] + text + ECC_ALONE[place:])

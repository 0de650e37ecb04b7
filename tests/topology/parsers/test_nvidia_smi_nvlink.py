"""`nvidia-smi nvlink --status`: links that run, that do not, and damaged lines."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.nvidia_smi_nvlink import answer_nvidia_smi_nvlink, parse_nvidia_smi_nvlink

HEAD = "GPU {0}: NVIDIA A30 (UUID: GPU-{0}0000000-1111-2222-3333-44444444444{0})\n"
LINKS = "\t Link 0: 25 GB/s\n\t Link 1: 25 GB/s\n\t Link 2: 25 GB/s\n"
TWO = HEAD.format(0) + LINKS + HEAD.format(1) + LINKS
INACTIVE = "NVML: Unable to retrieve NVLink information as all links are inActive\n"


def test_links_are_counted_by_state_and_speed():
    facts, warnings = answer_nvidia_smi_nvlink(TWO.replace("Link 1: 25 GB/s", "Link 1: <inactive>", 1))
    assert not warnings
    assert facts["gpus"][0] == {"index": 0, "name": "NVIDIA A30", "active": 2, "inactive": 1, "speeds": {"25 GB/s": 2}}
    (gpu, _), _ = parse_nvidia_smi_nvlink(TWO.replace("Link 1: 25 GB/s", "Link 1: <inactive>", 1))
    assert gpu.speed_gbyte_per_s == {0: 25.0, 1: None, 2: 25.0}
    assert gpu.uuid.endswith("0") and not gpu.told_inactive


def test_all_links_inactive_is_said_in_one_line():
    facts, warnings = answer_nvidia_smi_nvlink(HEAD.format(6) + INACTIVE)
    assert not warnings
    assert facts["gpus"] == [{"index": 6, "name": "NVIDIA A30", "active": 0, "inactive": 0, "speeds": {}}]
    assert parse_nvidia_smi_nvlink(HEAD.format(6) + INACTIVE)[0][0].told_inactive


@pytest.mark.parametrize("text", ["\n", " \n\n", "No devices were found\n"])
def test_machines_without_nvlink_print_nothing(text):
    assert answer_nvidia_smi_nvlink(text) == ({"gpu_count": 0, "gpus": []}, ())


def test_logs_mig_and_windows_change_nothing():
    plain = answer_nvidia_smi_nvlink(TWO)
    mig = "  MIG 1g.6gb      Device  0: (UUID: MIG-11111111-2222-3333-4444-555555555555)\n"
    assert answer_nvidia_smi_nvlink(HEAD.format(0) + mig + TWO.removeprefix(HEAD.format(0))) == plain
    assert answer_nvidia_smi_nvlink("".join(f"n-1: {line}\n" for line in TWO.splitlines())) == plain
    assert answer_nvidia_smi_nvlink(TWO.replace("\n", "\r\n")) == plain


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Link 1: 25 GB/s\n\t Link 2", "Link 2", "line 3: Link 2 where Link 1 is due"),
        ("Link 1", "Link 0", "line 3: Link 0 a second time, also in line 2; ignored"),
        ("Link 2: 25 GB/s\nGPU", "Link 2: 5 GB/s\nGPU", "line 4: Link 2 runs at 5 GB/s, others at 25 GB/s"),
        ("Link 2: 25 GB/s\nGPU", "Link 2: 25 G/s\nGPU", "line 4: no GPU and no link: 'Link 2: 25 G/s'"),
        ("\t Link 2: 25 GB/s\nGPU", "GPU", "line 1: 2 links, others of its kind have 3"),
        ("GPU 1: NVIDIA A30", "GPU 2: NVIDIA A30", "line 5: GPU 2 follows GPU 0"),
        ("GPU 1: NVIDIA A30", "GPU 1: VIDIA A30", "line 5: 'VIDIA A30' does not begin with NVIDIA"),
        ("GPU 1: NVIDIA A30", "GPU 1: NVIDIA A0", "line 5: 'NVIDIA A0' may be a damaged 'NVIDIA A30'"),
        ("GPU 1: NVIDIA", "GPU : NVIDIA", "line 5: not whole: 'GPU : NVIDIA A30"),
        ("GPU-10000000", "GPU-1000000", "line 5: 'GPU-1000000-1111-2222-3333-444444444441' is no whole UUID"),
        (HEAD.format(0), "", "line 1: Link 0 of no GPU, ignored"),
        (HEAD.format(1), HEAD.format(0), "line 5: GPU 0 a second time, also in line 1"),
        (HEAD.format(1), HEAD.format(1) + INACTIVE, "line 5: links are printed, although all are said to be inactive"),
        (HEAD.format(1) + LINKS, HEAD.format(1), "line 5: no link is printed"),
        (HEAD.format(1) + LINKS, HEAD.format(1) + "NVML: Unable to get it\n", "line 6: the links are not told"),
    ],
)  # fmt: skip
def test_damage_is_named_with_its_line(old, new, said):
    assert old in TWO
    _, warnings = answer_nvidia_smi_nvlink(TWO.replace(old, new, 1))
    assert any(warning.startswith(said) for warning in warnings), warnings


def test_facts_of_a_damaged_line_are_null_and_its_links_stay_its_own():
    facts, _ = answer_nvidia_smi_nvlink(TWO.replace("GPU 1: ", "GPU ?: "))
    assert [gpu["index"] for gpu in facts["gpus"]] == [0, None]
    assert [gpu["active"] for gpu in facts["gpus"]] == [3, 3]


def test_other_texts_are_refused():
    for text in (
        "Hello\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        "    GPU UUID                : GPU-1\n",
    ):
        with pytest.raises(CheckFailedError, match="no GPU and no NVLink"):
            answer_nvidia_smi_nvlink(text)
    with pytest.raises(CheckFailedError, match="this is not the status of links"):
        answer_nvidia_smi_nvlink(HEAD.format(0) + "\t Link 0, P2P is supported: true\n")


@given(st.text(alphabet="GPU 0:Link\n<>()/s.5-", max_size=80))
def test_nonsense_never_raises_another_error(text):
    with contextlib.suppress(CheckFailedError):
        answer_nvidia_smi_nvlink(TWO[:150] + text)
        answer_nvidia_smi_nvlink(text)

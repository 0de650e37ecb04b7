"""ibstatus of several ports and kernels, and what is left of it when lines are damaged."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.ibstatus import answer_ibstatus, parse_ibstatus

PORT = """Infiniband device '{name}' port {port} status:
\tdefault gid:\t fe80:0000:0000:0000:0000:0000:0000:00{gid}
\tbase lid:\t {lid}
\tsm lid:\t\t 0x3
\tstate:\t\t 4: ACTIVE
\tphys state:\t 5: LinkUp
\trate:\t\t 400 Gb/sec (4X NDR)
\tlink_layer:\t InfiniBand

"""
ONE = PORT.format(name="mlx5_0", port=1, gid="a1", lid="0x1f")
TWO = ONE + PORT.format(name="mlx5_1", port=1, gid="a2", lid="0x20")


def test_two_ports():
    facts, warnings = answer_ibstatus(TWO)
    assert (facts["port_count"], facts["active"], warnings) == (2, 2, ())
    assert facts["ports"][1] == {
        "device": "mlx5_1", "port": 1, "default_gid": "fe80:0000:0000:0000:0000:0000:0000:00a2", "base_lid": "0x20",
        "sm_lid": "0x3", "state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
    }  # fmt: skip
    (first, _), _ = parse_ibstatus(TWO)
    assert (first.device, first.port, first.base_lid, first.rate_gbit_per_s) == ("mlx5_0", 1, 31, 400.0)


@pytest.mark.parametrize(
    ("rate", "gbit_per_s"),
    [("2.5 Gb/sec (1X)", 2.5), ("10 Gb/sec (4X SDR)", 10), ("56 Gb/sec (4X FDR)", 56), ("100 Gb/sec (2X HDR)", 100)],
)
def test_rates_of_other_generations(rate, gbit_per_s):
    (port,), warnings = parse_ibstatus(ONE.replace("400 Gb/sec (4X NDR)", rate))
    assert (port.rate_gbit_per_s, warnings) == (gbit_per_s, ())


def test_what_is_unknown_to_the_kernel_is_printed_so_and_typed_as_none():
    text = ONE.replace("0x1f", "unknown").replace("fe80:0000:0000:0000:0000:0000:0000:00a1", "unknown")
    facts, warnings = answer_ibstatus(text)
    assert (facts["ports"][0]["base_lid"], facts["ports"][0]["default_gid"], warnings) == ("unknown", "unknown", ())
    (port,), _ = parse_ibstatus(text)
    assert port.base_lid is port.default_gid is None


def test_a_log_prefix_and_windows_line_ends_are_passed_over():
    text = re.sub("(?m)^(?=.)", "node9: ", TWO).replace("\n", "\r\n")
    assert parse_ibstatus(text) == parse_ibstatus(TWO)


def test_no_device_is_an_answer():
    facts, warnings = answer_ibstatus("Fatal error:  device '*': sys files not found (/sys/class/infiniband/*/ports)\n")
    assert (facts["port_count"], facts["ports"]) == (0, [])
    assert warnings[0].startswith("line 1: ")


def test_damaged_values_are_null_and_named():
    for said, damaged, key, number in [
        ("400 Gb/sec", "40 Gb/sec", "rate", 1),
        ("4: ACTIVE", "4: ACTVE", "state", 5),
        ("4: ACTIVE", "1: ACTIVE", "state", 5),
        ("0x1f", "1f", "base_lid", 3),
        ("00a1", "00a", "default_gid", 2),
    ]:
        facts, warnings = answer_ibstatus(ONE.replace(said, damaged))
        assert facts["ports"][0][key] is None
        assert any(warning.startswith(f"line {number}: ") for warning in warnings), warnings


def test_a_lost_header_gives_no_facts_to_another_port():
    facts, warnings = answer_ibstatus(TWO.replace("Infiniband device 'mlx5_1' port 1 status:\n", ""))
    assert facts["ports"] == answer_ibstatus(ONE)[0]["ports"]
    assert any("the header of a port is lost" in warning for warning in warnings)


def test_every_repeated_line_is_named_and_counts_once():
    for line in ONE.rstrip().splitlines(keepends=True):
        facts, warnings = answer_ibstatus(ONE.replace(line, line.rstrip("\n") + "\n" + line, 1))
        assert facts == answer_ibstatus(ONE)[0] and any("second time" in warning for warning in warnings), line


def test_contradictions_between_lines_are_named():
    for text, said in [
        (ONE.replace("5: LinkUp", "3: Disabled"), "does not go with"),
        (ONE.replace("InfiniBand", "Ethernet"), "no subnet manager on Ethernet"),
        (ONE.replace("0x1f", "0x0"), "has a lid"),
        (ONE + ONE, "line 10: mlx5_0:1 is printed a second time"),
        (TWO.replace("mlx5_0", "mlx5_2"), "line 10: mlx5_1:1 does not follow mlx5_2:1"),
        (ONE.replace("\tsm lid:\t\t 0x3\n", ""), "line 1: port mlx5_0:1 is without sm lid"),
        (ONE.replace("mlx5_0", "ml5_0").replace("ml5", "mlx"), "no usual name"),
    ]:
        assert said in "".join(answer_ibstatus(text)[1])


@settings(deadline=None)
@given(st.integers(1, len(TWO) - 1))
def test_a_text_that_is_cut_states_nothing_new(size):
    try:
        facts, warnings = answer_ibstatus(TWO[:size])
    except CheckFailedError:
        return
    whole = answer_ibstatus(TWO)[0]["ports"]
    assert warnings or TWO[:size].strip() in (ONE.strip(), TWO.strip())
    for port, right in zip(facts["ports"], whole, strict=False):
        assert all(value in (None, right[key]) for key, value in port.items())


@settings(deadline=None)
@given(st.text(max_size=60), st.integers(0, len(TWO)))
def test_any_text_is_read_or_refused(text, place):
    answer_ibstatus(ONE + text + TWO[place:])
    with pytest.raises(CheckFailedError):
        answer_ibstatus(text)

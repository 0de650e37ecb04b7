"""opainfo of one and two ports, and what is left of it when lines are damaged."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.opainfo import answer_opainfo, parse_opainfo

ONE = """hfi1_0:1                           PortGID:0xfe80000000000000:00117501aabbccdd
   PortState:     Active
   LinkSpeed      Act: 25Gb         En: 25Gb
   LinkWidth      Act: 4            En: 4
   LinkWidthDnGrd ActTx: 4  Rx: 4   En: 3,4
   LCRC           Act: 14-bit       En: 14-bit,16-bit,48-bit       Mgmt: True
   LID: 0x0000001a-0x0000001a       SM LID: 0x00000002 SL: 0
         QSFP Copper,       3m  Someone           P/N ABC-1             Rev 02
   Xmit Data:               1000 MB Pkts:                 2000
   Recv Data:               3000 MB Pkts:                 4000
   Link Quality: 5 (Excellent)
"""
DOWN = (
    ONE.replace("hfi1_0", "hfi1_1").replace("Active", "Down (Polling)").replace("Act: 25Gb", "Act: None")
    .replace("Act: 4 ", "Act: None ").replace("ActTx: 4", "ActTx: None").replace("0x0000001a", "0x00000000")
    .replace("0x00000002", "0x00000000").replace("5 (Excellent)", "0 (Down)").replace("aabbccdd", "aabbccde")
)  # fmt: skip


def test_one_port():
    facts, warnings = answer_opainfo(ONE)
    assert not warnings
    assert facts == {
        "ports": 1, "device": "hfi1_0", "port": 1, "state": "Active", "lane_speed": "25Gb", "width": 4, "rate_gbps": 100,
        "lid": 26, "sm_lid": 2,
    }  # fmt: skip


def test_a_port_that_is_down_has_no_rate():
    (first, second), warnings = parse_opainfo(ONE + DOWN)
    assert (first.rate_gbit_per_s, first.link_quality, warnings) == (100.0, 5, ())
    assert (second.state, second.lanes, second.rate_gbit_per_s, second.lid) == ("Down (Polling)", None, None, 0)
    assert answer_opainfo(ONE + DOWN)[0] == {**answer_opainfo(ONE)[0], "ports": 2}


def test_other_layouts_read_the_same():
    short = re.sub(" +", " ", ONE)
    for other in (
        short,
        ONE.replace("PortGID:0xfe80000000000000:", "PortGUID:0x"),
        re.sub("(?m)^(?=.)", "n3: ", ONE).replace("\n", "\r\n"),
        "[root@n3 ~]# opainfo\n" + ONE,
    ):
        assert answer_opainfo(other) == answer_opainfo(ONE)
    assert (
        answer_opainfo(ONE.replace("25Gb", "12.5Gb").replace(" 4 ", " 3 ").replace("En: 4", "En: 3,4"))[0]["rate_gbps"]
        == 37.5
    )


@pytest.mark.parametrize(
    ("said", "damaged", "keys"),
    [
        ("PortState:     Active", "PortState:     Actve", ["state"]),
        ("Act: 25Gb", "Act: 25b", ["lane_speed", "rate_gbps"]),
        ("LinkWidth      Act: 4", "LinkWidth      Act:", ["width", "rate_gbps"]),
        ("0x0000001a-", "0x000001a-", ["lid", "sm_lid"]),
    ],
)
def test_damaged_values_are_null_and_named(said, damaged, keys):
    facts, warnings = answer_opainfo(ONE.replace(said, damaged))
    assert [key for key, value in facts.items() if value is None] == keys
    number = 1 + ONE[: ONE.index(said)].count("\n")
    assert warnings[0].startswith(f"line {number}: ")


def test_one_line_against_another():
    for text, said in [
        (ONE.replace("Act: 25Gb", "Act: 5Gb"), "a speed of 5Gb where 25Gb is enabled"),
        (ONE.replace("LinkWidth      Act: 4", "LinkWidth      Act: 3"), "4 and 4 lanes of 3"),
        (ONE.replace("-0x0000001a", "-0x00000019"), "run backwards"),
        (ONE.replace("0x00000002", "0x00000000"), "an active port has a lid"),
        (ONE + ONE, "line 12: hfi1_0:1 is printed a second time"),
        (ONE.replace("5 (Excellent)", "4 (Excellent)"), "line 11: Link Quality is not read"),
        (ONE + "and so on\n", "line 12: not part of a port"),
    ]:
        assert said in "".join(answer_opainfo(text)[1]), said


def test_every_lost_joined_or_repeated_line_is_named():
    lines = ONE.splitlines(keepends=True)
    for place, line in enumerate(lines):
        if "QSFP" in line:
            continue
        assert answer_opainfo("".join(lines[:place] + lines[place + 1 :]))[1], line
        assert answer_opainfo("".join([*lines[:place], line.rstrip("\n"), *lines[place + 1 :]]))[1], line
        facts, warnings = answer_opainfo("".join(lines[: place + 1] + lines[place:]))
        assert facts == answer_opainfo(ONE)[0] and warnings, line
    second = ONE + DOWN.split("\n", 1)[1]
    facts, warnings = answer_opainfo(second)
    assert facts == answer_opainfo(ONE)[0] and "line 12: the header of a port is lost" in warnings


@settings(deadline=None)
@given(st.integers(0, len(ONE)))
def test_a_text_that_is_cut_states_nothing_new(size):
    try:
        facts, warnings = answer_opainfo(ONE[:size])
    except CheckFailedError:
        return
    whole = answer_opainfo(ONE)[0]
    assert warnings or size >= len(ONE)
    assert all(value in (None, whole[key]) or key == "ports" for key, value in facts.items())


@settings(deadline=None)
@given(st.integers(0, len(ONE)), st.integers(0, 60), st.text(max_size=5))
def test_damage_never_raises(begin, count, put):
    try:
        _, warnings = answer_opainfo(ONE[:begin] + put + ONE[begin + count :])
    except CheckFailedError:
        return
    assert all(re.match(r"line \d+: ", warning) for warning in warnings)


def test_texts_of_something_else_are_refused():
    for text in ("", "opainfo: No HFIs found\n"):
        with pytest.raises(CheckFailedError):
            answer_opainfo(text)

"""ibstat of several adapters, drivers and versions, and what is left of it when lines are damaged."""

import contextlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.ibstat import answer_ibstat, parse_ibstat

ADAPTER = """CA '{name}'
\tCA type: MT4129
\tNumber of ports: 1
\tFirmware version: 28.10.2002
\tHardware version: 0
\tNode GUID: 0x0000aa00000{guid}
\tSystem image GUID: 0x0000aa00000{guid}
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tBase lid: {lid}
\t\tLMC: 0
\t\tSM lid: 3
\t\tCapability mask: 0xa751e848
\t\tPort GUID: 0x0000aa00000{guid}
\t\tLink layer: InfiniBand
"""
ONE = ADAPTER.format(name="mlx5_0", guid="00001", lid=17)
TWO = ONE + ADAPTER.format(name="mlx5_1", guid="00002", lid=18)
ETHERNET = (
    ONE.replace("Base lid: 17", "Base lid: 0").replace("SM lid: 3", "SM lid: 0").replace("InfiniBand", "Ethernet")
)


def test_two_adapters():
    facts, warnings = answer_ibstat(TWO)
    assert not warnings
    assert facts["ca_names_in_order"] == ["mlx5_0", "mlx5_1"]
    assert (facts["ca_count"], facts["port_count"], facts["active_ports"], facts["not_active"]) == (2, 2, 2, [])
    assert (facts["active_infiniband"], facts["active_ethernet"]) == (["mlx5_0:1", "mlx5_1:1"], [])
    assert facts["cas"][1] == {
        "name": "mlx5_1", "ca_type": "MT4129", "nports": 1, "fw": "28.10.2002",
        "ports": [{"port": 1, "state": "Active", "phys": "LinkUp", "rate": 400, "base_lid": 18, "sm_lid": 3,
                   "link_layer": "InfiniBand"}],
    }  # fmt: skip
    assert answer_ibstat(ETHERNET)[0]["active_ethernet"] == ["mlx5_0:1"]


def test_a_port_is_active_only_when_a_subnet_manager_made_it_so():
    text = ONE.replace("State: Active", "State: Initializing").replace("Base lid: 17", "Base lid: 65535")
    (adapter,), warnings = parse_ibstat(text.replace("Rate: 400", "Rate: 2.5"))
    (port,) = adapter.ports
    assert (port.active, port.rate_gb_per_s, port.base_lid, warnings) == (False, 2.5, 65535, ())
    assert parse_ibstat(ONE)[0][0].ports[0].active
    assert answer_ibstat(text)[0]["not_active"] == ["mlx5_0:1 Initializing/LinkUp"]


@pytest.mark.parametrize(
    "around",
    [
        lambda text: re.sub(r"(?m)^\s+", "", text),
        lambda text: text.replace("\n", "\r\n").replace("\t", "        "),
        lambda text: "[root@n1 ~]# ibstat\n" + text.replace("CA type", "\x1b[1mCA type\x1b[0m"),
        lambda text: re.sub("(?m)^(?=.)", "node17: ", text),
        lambda text: re.sub("(?m)^(?=.)", "> ", text),
        lambda text: "".join(f"2024-03-0{i % 9} 10:00:{i} n1 {line}" for i, line in enumerate(text.splitlines(True))),
    ],
)
def test_what_mails_logs_and_terminals_put_around_the_text_is_passed_over(around):
    assert parse_ibstat(around(TWO)) == parse_ibstat(TWO)


def test_other_drivers_and_one_port_alone():
    soft = ONE.replace("mlx5_0", "rxe0").replace("MT4129", "").replace("28.10.2002", "")
    facts, warnings = answer_ibstat(soft)
    assert (facts["cas"][0]["ca_type"], facts["cas"][0]["fw"], warnings) == ("", "", ())
    fdr10 = ONE.replace("mlx5_0", "mlx4_0").replace("28.10.2002", "2.42.5000").replace("Rate: 400", "Rate: 40 (FDR10)")
    assert answer_ibstat(fdr10)[0]["cas"][0]["ports"][0]["rate"] == 40
    alone = "CA: 'mlx5_0'\n" + ONE[ONE.index("\tPort 1:") :]
    facts, warnings = answer_ibstat(alone)
    assert (facts["cas"][0]["ports"][0]["base_lid"], warnings) == (17, ())
    assert "ca_type" not in facts["cas"][0], "what is not printed is left out"


def test_a_value_without_its_form_is_null_and_named():
    for said, damaged, key in [
        ("Rate: 400", "Rate: 4", "rate"),
        ("State: Active", "State: Actve", "state"),
        ("Base lid: 17", "Base lid: 1x", "base_lid"),
        ("Link layer: InfiniBand", "Link layer: InfiniBan", "link_layer"),
    ]:
        facts, warnings = answer_ibstat(ONE.replace(said, damaged))
        assert facts["cas"][0]["ports"][0][key] is None
        number = 1 + ONE[: ONE.index(said)].count("\n")
        assert any(warning.startswith(f"line {number}: ") for warning in warnings)
    facts, warnings = answer_ibstat(ONE.replace("28.10.2002", "28.10.202").replace("MT4129", "M4129"))
    assert facts["cas"][0]["fw"] is facts["cas"][0]["ca_type"] is None and len(warnings) == 2


def test_a_lost_header_gives_no_port_to_another_adapter():
    lines = TWO.splitlines(keepends=True)
    facts, warnings = answer_ibstat("".join(lines[:17] + lines[18:]))
    assert (facts["ca_count"], facts["port_count"]) == (1, 1)
    assert facts["cas"] == answer_ibstat(ONE)[0]["cas"]
    assert any("line 18: CA type belongs to nothing" in warning for warning in warnings)

    # Both headers: what stands below a key that is printed again is not the first port's.
    facts, warnings = answer_ibstat("".join(lines[:17] + lines[25:]))
    assert facts["cas"] == answer_ibstat(ONE)[0]["cas"]
    assert any("line 18: State is printed a second time" in warning for warning in warnings)

    # From the middle of one port to the middle of the other: nothing says which of two values is whose.
    facts, warnings = answer_ibstat("".join(lines[:12] + lines[28:]))
    (port,) = facts["cas"][0]["ports"]
    assert port == {"port": 1, "state": "Active", "phys": "LinkUp", "rate": 400, "base_lid": None}
    assert any("line 13: a second Base lid" in warning for warning in warnings)


def test_joined_repeated_and_swapped_lines_are_named():
    joined = ONE.replace("Rate: 400\n", "Rate: 400")
    facts, warnings = answer_ibstat(joined)
    assert facts["cas"][0]["ports"][0]["rate"] is None and "base_lid" not in facts["cas"][0]["ports"][0]
    assert any("line 11: Rate is not read" in warning for warning in warnings)
    for line in (*ONE.splitlines(keepends=True),):
        facts, warnings = answer_ibstat(ONE.replace(line, line * 2, 1))
        assert facts == answer_ibstat(ONE)[0] and "second time" in "".join(warnings), line
    swapped = ONE.replace("\t\tLMC: 0\n\t\tSM lid: 3\n", "\t\tSM lid: 3\n\t\tLMC: 0\n")
    assert "line 13: SM lid" not in answer_ibstat(swapped)[1]
    assert any(warning.startswith("line 14: LMC stands behind") for warning in answer_ibstat(swapped)[1])


def test_facts_that_do_not_go_together_are_named():
    for text, said in [
        (ONE.replace("LinkUp", "Disabled"), "Active does not go with Disabled"),
        (ETHERNET.replace("SM lid: 0", "SM lid: 3"), "no subnet manager on Ethernet"),
        (ONE.replace("Base lid: 17", "Base lid: 0"), "has a lid"),
        (ONE.replace("of ports: 1", "of ports: 2"), "has 2 ports but 1 are printed"),
        (TWO.replace("mlx5_1", "mlx5_0"), "mlx5_0 is printed a second time"),
        (ONE.replace("mlx5_0", "mlx5"), "no usual name"),
        (TWO.replace("\t\tLMC: 0\n", "", 1), "line 8: port 1 is without LMC"),
    ]:
        assert said in "".join(answer_ibstat(text)[1])


@pytest.mark.parametrize("size", range(1, len(ONE), 7))
def test_a_text_that_is_cut_is_named(size):
    try:
        facts, warnings = answer_ibstat(ONE[:size])
    except CheckFailedError:
        return
    assert warnings
    for port in (port for adapter in facts["cas"] for port in adapter["ports"]):
        assert port.get("base_lid") in (None, 17) and port.get("rate") in (None, 400)


def test_a_failure_behind_whole_adapters_is_named():
    facts, warnings = answer_ibstat(ONE + "ibpanic: [7] main: stat of IB device 'mlx5_1' failed\n")
    assert facts == answer_ibstat(ONE)[0]
    assert [warning.partition(":")[0] for warning in warnings] == ["line 18"]


def test_texts_of_something_else_are_refused():
    for text in ("", "\n\n", "command not found: ibstat\n", '{"a": 1}'):
        with pytest.raises(CheckFailedError) as error:
            answer_ibstat(text)
        assert error.value.where == "line 1"


@settings(deadline=None)
@given(
    st.tuples(st.integers(0, len(TWO)), st.integers(0, 60), st.sampled_from(["", "X", "\t", "\n", "²", "9" * 30, "'"]))
)
def test_damage_never_raises(damage):
    begin, count, put = damage
    _, warnings = answer_ibstat(TWO[:begin] + put + TWO[begin + count :])
    assert all(re.match(r"line \d+: ", warning) for warning in warnings)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(CheckFailedError):
        answer_ibstat(text)

"""ibstat of several adapters, drivers and versions, and what is left of it when lines are damaged."""

import re

import pytest

from toolkit.errors import CheckFailedError
from toolkit.topology.readers.ibstat import answer_ibstat

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
    facts, warnings = answer_ibstat(text.replace("Rate: 400", "Rate: 2.5"))
    (port,) = facts["cas"][0]["ports"]
    assert (facts["active_ports"], port["rate"], port["base_lid"], warnings) == (0, 2.5, 65535, ())
    assert answer_ibstat(ONE)[0]["active_ports"] == 1
    assert answer_ibstat(text)[0]["not_active"] == ["mlx5_0:1 Initializing/LinkUp"]


@pytest.mark.parametrize(
    "around",
    [
        lambda text: re.sub(r"(?m)^\s+", "", text),
        lambda text: text.replace("\n", "\r\n").replace("\t", "        "),
        lambda text: text.replace("CA type", "\x1b[1mCA type\x1b[0m"),
        lambda text: re.sub("(?m)^(?=.)", "node17: ", text),
        lambda text: "".join(
            f"2024-03-0{i % 9} 10:00:{i:02} n1: {line}" for i, line in enumerate(text.splitlines(True))
        ),
    ],
)
def test_what_mails_logs_and_terminals_put_around_the_text_is_passed_over(around):
    assert answer_ibstat(around(TWO)) == answer_ibstat(TWO)


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


COUNTS = ("ca_count", "ca_names_in_order", "port_count", "active_ports", "active_infiniband", "active_ethernet")


@pytest.mark.parametrize(
    ("old", "new", "line", "ports"),
    [
        ("CA 'mlx5_1'\n", "", 18, 1),  # a lost header gives no port to another adapter
        ("CA 'mlx5_1'\n\tCA type: MT4129\n", "CA 'mlx5_1'\tCA type: MT4129\n", 18, 1),
        ("Base lid: 18", "Base lid: 1x", 29, 2),
        ("State: Active\n\t\tPhysical state: LinkUp\n\t\tRate: 400\n\t\tBase lid: 18",
         "Physical state: LinkUp\n\t\tState: Active\n\t\tRate: 400\n\t\tBase lid: 18", 27, 2),
    ],
)  # fmt: skip
def test_reading_ends_at_the_first_damaged_line(old, new, line, ports):
    assert old in TWO
    facts, (warning,) = answer_ibstat(TWO.replace(old, new, 1))
    assert warning.startswith(f"line {line}: ")
    assert {facts[key] for key in COUNTS} == {None}
    found = [port for adapter in facts["cas"] for port in adapter["ports"]]
    assert len(found) == ports and facts["cas"][0] == answer_ibstat(ONE)[0]["cas"][0]
    assert all("base_lid" not in port for port in found[1:])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("28.10.2002", "28.10.202", "line 4: invalid value of Firmware version"),
        ("of ports: 1", "of ports: 2", "line 1: expected 2 ports of mlx5_0, got 1"),
        ("\t\tLMC: 0\n", "", "line 8: port 1 has no LMC"),
    ],
)
def test_damage_of_an_adapter_is_named(old, new, said):
    assert answer_ibstat(TWO.replace(old, new, 1))[1][0].startswith(said)


def test_a_failure_after_whole_adapters_is_named_and_counts_are_unknown():
    facts, (warning,) = answer_ibstat(ONE + "ibpanic: [7] main: stat of IB device 'mlx5_1' failed\n")
    assert facts["cas"] == answer_ibstat(ONE)[0]["cas"] and facts["ca_count"] is None
    assert warning.startswith("line 18: ")


PANIC = "ibpanic: [7] main: stat of IB device 'mlx5_2' failed: No such file or directory\n"


@pytest.mark.parametrize("at", [0, 3, 17, 20, 34])
def test_complaints_of_ibstat_are_named_wherever_they_are(at):
    lines = TWO.splitlines(keepends=True)
    facts, (warning,) = answer_ibstat("".join([*lines[:at], PANIC, *lines[at:]]))
    assert facts["cas"] == answer_ibstat(TWO)[0]["cas"] and facts["ca_count"] is None
    assert warning.startswith(f"line {at + 1}: the output lacks mlx5_2: 'ibpanic: ".replace("'", '"'))


PROMPTS = (
    "$ ibstat",
    "[root@node1 ~]# ibstat -v",
    "(base) me@node1:~/work$ /usr/sbin/ibstat",
    "node1:/tmp # ibstat",
    "[me@node1 ~]$",
)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_of_a_shell_are_no_part_of_the_output(prompt):
    assert answer_ibstat(f"{prompt}\n{TWO}") == answer_ibstat(TWO)
    assert answer_ibstat(f"{TWO}{prompt}\n") == answer_ibstat(TWO)
    assert answer_ibstat(f"{prompt}\n{PANIC}{TWO}{prompt}\n")[0]["cas"] == answer_ibstat(TWO)[0]["cas"]


def test_texts_of_something_else_are_refused():
    for text in ("", "\n\n", "command not found: ibstat\n", '{"a": 1}'):
        with pytest.raises(CheckFailedError) as error:
            answer_ibstat(text)
        assert error.value.where == "line 1"

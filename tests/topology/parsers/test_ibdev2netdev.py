"""ibdev2netdev in its forms, and what the names in it tell of lines that are damaged."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.device_names import after_a_gap, is_odd_device, odd_ones, out_of_order
from toolkit.topology.parsers.ibdev2netdev import answer_ibdev2netdev, parse_ibdev2netdev

TEXT = """mlx5_0 port 1 ==> ib0 (Up)
mlx5_1 port 1 ==> enp7s0f0np0 (Down)
mlx5_1 port 2 ==> enp7s0f1np1 (Up)
mlx5_2 port 1 ==> bond0 (Up)
"""


def test_each_line_is_a_port_with_its_interface():
    facts, warnings = answer_ibdev2netdev(TEXT)
    assert (facts["rows"], facts["up"], warnings) == (4, ["mlx5_0", "mlx5_1", "mlx5_2"], ())
    assert facts["map"][1] == {"ibdev": "mlx5_1", "port": "1", "netdev": "enp7s0f0np0", "state": "Down"}


def test_verbose_old_arrows_rulers_prompts_and_prefixes():
    verbose = (
        "0000:1a:00.0 mlx5_0 (MT4119 - MCX515A-CCAT) CX515A - ConnectX-5 QSFP28 fw 16.25.1020 port 1 (ACTIVE) ==> ib0 (Up)\n"
        "0000:3b:00.1 mlx5_1 (MT4119 - NA) fw 16.25.1020 port 1 (DOWN  ) ==> enp59s0f1 (Down)\n"
    )
    interfaces, warnings = parse_ibdev2netdev(verbose)
    assert [(one.device, one.port, one.interface, one.up, one.pci_address) for one in interfaces] == [
        ("mlx5_0", 1, "ib0", True, "0000:1a:00.0"),
        ("mlx5_1", 1, "enp59s0f1", False, "0000:3b:00.1"),
    ]
    assert not warnings
    for other in (
        TEXT.replace("==>", "<===>"),
        "-----------\n" + TEXT,
        "# ibdev2netdev\n" + TEXT,
        re.sub("(?m)^(?=.)", "node3: ", TEXT).replace("\n", "\r\n"),
    ):
        assert answer_ibdev2netdev(other) == answer_ibdev2netdev(TEXT)


def test_a_port_without_interface():
    facts, warnings = answer_ibdev2netdev("mlx5_0 port 1 ==>  (Down)\n")
    assert facts["map"] == [{"ibdev": "mlx5_0", "port": "1", "netdev": None, "state": "Down"}]
    assert warnings == ("line 1: mlx5_0 port 1 has no interface",)


@pytest.mark.parametrize(
    "damaged",
    [
        "mlx5_1 port ==> enp7s0f0np0 (Down)",
        "mlx5_1 port 1 ==> enp7s0f0np0 (Dow)",
        "mlx5_1 port 1 ==> enp7s0f0np0 (Down)x",
        "enp7s0f0np0 port 1 ==> mlx5_1 (Down)",
    ],
)
def test_a_damaged_line_counts_and_says_nothing(damaged):
    facts, warnings = answer_ibdev2netdev(TEXT.replace("mlx5_1 port 1 ==> enp7s0f0np0 (Down)", damaged))
    assert facts["rows"] == 4
    assert facts["map"][1] == {"ibdev": None, "port": None, "netdev": None, "state": None}
    assert warnings[0].startswith("line 2: no device with its interface")


def test_what_the_order_and_the_names_tell():
    lines = TEXT.splitlines(keepends=True)
    for text, said in [
        (lines[0] + TEXT, "line 2: mlx5_0 port 1 is printed a second time"),
        ("".join(lines[::-1]), "line 2: mlx5_1 does not follow mlx5_2"),
        (lines[0] + lines[3], "line 2: mlx5_2 does not follow mlx5_0"),
        (TEXT.replace("mlx5_0", "lx5_0"), "line 1: 'lx5_0' is no usual name"),
        (TEXT.replace("enp7s0f1np1", "en7s0f1np1"), "line 3: 'en7s0f1np1' is no usual name"),
        (TEXT + "hello\n", "line 5: not part of the table: 'hello'"),
        (TEXT[:-1], "line 4: has no line end"),
    ]:
        assert said in "".join(answer_ibdev2netdev(text)[1]), said


def test_usual_names_are_not_odd():
    usual = """mlx5_0 mlx5_bond_0 mlx4_0 mlx5_ib3 rocep94s0f0 roceo1 ibp12s0 bnxt_re0 bnxt_re_bond0 irdma1 hfi1_0 rdmap16s27 ib0
    ibs5 eno1 eno2np1 ens3 ens5f0 ens5f1np1 enp94s0f0np0 enP2p1s0f0np0 enp1s0f0v3 enp65s0f0np0.100 enx0123456789ab eth0
    bond0 bond1.20 siw0 rxe_eth0 efa_0""".split()  # noqa: SIM905
    assert [name for name in usual if is_odd_device(name)] == []
    assert odd_ones(usual) == []
    assert out_of_order(["mlx5_0", "mlx5_2", "mlx5_10"]) is None
    assert out_of_order(["mlx5_0", "mlx5_10", "mlx5_2"]) is None
    assert after_a_gap(["mlx5_0", "mlx5_10", "mlx5_2"]) == [2, 1]
    assert after_a_gap(["mlx5_0", "mlx5_4", "mlx5_bond_0"]) == []


def test_texts_of_something_else_are_refused():
    for text in ("", "hello\n", "No devices found\n"):
        with pytest.raises(CheckFailedError):
            answer_ibdev2netdev(text)


@settings(deadline=None)
@given(st.integers(0, len(TEXT)), st.integers(0, 30), st.text(st.characters(exclude_characters="\r\x1b"), max_size=5))
def test_damage_never_raises_nor_states_what_no_line_says(begin, count, put):
    text = TEXT[:begin] + put + TEXT[begin + count :]
    try:
        facts, warnings = answer_ibdev2netdev(text)
    except CheckFailedError:
        return
    assert all(re.match(r"line \d+: ", warning) for warning in warnings)
    assert facts["rows"] == sum("==>" in line for line in text.split("\n"))
    assert all(entry["ibdev"] is None or entry["ibdev"] in text for entry in facts["map"])

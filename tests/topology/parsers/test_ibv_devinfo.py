"""ibv_devinfo of several devices, with -v and -l, and what is left of it when lines are damaged."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.ibv_devinfo import answer_ibv_devinfo, parse_ibv_devinfo

HEAD = """hca_id:\t{name}
\ttransport:\t\t\tInfiniBand (0)
\tfw_ver:\t\t\t\t28.10.2002
\tnode_guid:\t\t\t0000:aa00:0000:0001
\tsys_image_guid:\t\t\t0000:aa00:0000:0001
\tvendor_id:\t\t\t0x02c9
\tvendor_part_id:\t\t\t4129
\thw_ver:\t\t\t\t0x0
\tboard_id:\t\t\tMT_0000000001
\tphys_port_cnt:\t\t\t{ports}
"""
PORT = """\t\tport:\t{number}
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t4096 (5)
\t\t\tsm_lid:\t\t\t3
\t\t\tport_lid:\t\t{lid}
\t\t\tport_lmc:\t\t0x00
\t\t\tlink_layer:\t\tInfiniBand

"""
ONE = HEAD.format(name="mlx5_0", ports=1) + PORT.format(number=1, lid=17)
TWO = ONE + HEAD.format(name="mlx5_1", ports=2) + PORT.format(number=1, lid=18) + PORT.format(number=2, lid=19)
VERBOSE = (
    ONE.replace(
        "\t\tport:",
        "\tmax_mr_size:\t\t\t0xffffffffffffffff\n\tdevice_cap_flags:\t\t0x00001c36\n\t\t\t\t\tBAD_PKEY_CNTR\n"
        "\tatomic_cap:\t\t\tATOMIC_HCA (1)\n\trc_odp_caps:\n\t\t\t\t\tNO SUPPORT\n\tnum_comp_vectors:\t\t63\n\t\tport:",
    ).rstrip()
    + "\n\t\t\tmax_msg_sz:\t\t0x40000000\n\t\t\tactive_speed:\t\t100.0 Gbps (128)\n\t\t\tphys_state:\t\tLINK_UP (5)\n"
    "\t\t\tGID[  0]:\t\tfe80:0000:0000:0000:0000:aa00:0000:0001\n\n"
)


def test_two_devices():
    facts, warnings = answer_ibv_devinfo(TWO)
    assert (facts["device_count"], warnings) == (2, ())
    assert facts["active_ports"] == ["mlx5_0:1", "mlx5_1:1", "mlx5_1:2"]
    port = {"state": "PORT_ACTIVE (4)", "active_mtu": "4096 (5)", "sm_lid": "3", "link_layer": "InfiniBand"}
    assert facts["devices"][0] == {
        "hca_id": "mlx5_0", "transport": "InfiniBand (0)", "fw_ver": "28.10.2002", "vendor_id": "0x02c9",
        "vendor_part_id": "4129", "board_id": "MT_0000000001", "phys_port_cnt": "1",
        "ports": [{"port": 1, "port_lid": "17", **port}],
    }  # fmt: skip
    (_, second), _ = parse_ibv_devinfo(TWO)
    assert (second.vendor_id, second.port_count, second.ports[1].lid) == (0x2C9, 2, 19)
    assert second.ports[0].active_mtu_bytes == 4096


def test_verbose_reads_the_same_without_warnings():
    assert answer_ibv_devinfo(VERBOSE) == answer_ibv_devinfo(ONE)


def test_names_alone():
    facts, warnings = answer_ibv_devinfo("2 HCAs found:\n\tmlx5_0\n\tmlx5_1\n\n")
    assert [device["hca_id"] for device in facts["devices"]] == ["mlx5_0", "mlx5_1"]
    assert (facts["device_count"], facts["active_ports"], warnings) == (2, [], ())
    assert answer_ibv_devinfo("3 HCAs found:\n\tmlx5_0\n\tmlx5_0\n")[1] == (
        "line 3: not part of the list of devices: 'mlx5_0'",
        "line 1: 3 devices are said but 1 are named",
    )


def test_no_device_is_an_answer():
    facts, warnings = answer_ibv_devinfo("No IB devices found\n")
    assert (facts, warnings) == ({"device_count": 0, "active_ports": [], "devices": []}, ())


def test_other_drivers_and_a_log_prefix():
    soft = (
        ONE.replace("mlx5_0", "siw0")
        .replace("InfiniBand (0)", "iWARP (1)")
        .replace("\tfw_ver:\t\t\t\t28.10.2002\n", "")
    )
    soft = (
        soft.replace("MT_0000000001", "100-1 rev B")
        .replace("InfiniBand", "Ethernet")
        .replace("sm_lid:\t\t\t3", "sm_lid:\t0")
    )
    facts, warnings = answer_ibv_devinfo(soft)
    assert (facts["devices"][0]["transport"], facts["devices"][0]["board_id"]) == ("iWARP (1)", "100-1 rev B")
    assert warnings == ("line 1: device siw0 is without fw_ver",)
    assert answer_ibv_devinfo(re.sub("(?m)^(?=.)", "[n1] ", TWO)) == answer_ibv_devinfo(TWO)


def test_damaged_values_are_null_and_named():
    for said, damaged, key in [
        ("InfiniBand (0)", "InfiniBand (1)", "transport"),
        ("28.10.2002", "28.102002", "fw_ver"),
        ("0x02c9", "x02c9", "vendor_id"),
        ("MT_0000000001", "MT_000000001", "board_id"),
        ("phys_port_cnt:\t\t\t1", "phys_port_cnt:\t\t\t1 1", "phys_port_cnt"),
    ]:
        facts, warnings = answer_ibv_devinfo(ONE.replace(said, damaged))
        assert facts["devices"][0][key] is None and len(warnings) == 1
    for said, damaged, key in [
        ("PORT_ACTIVE (4)", "PORT_ACTIVE (3)", "state"),
        ("active_mtu:\t\t4096 (5)", "active_mtu:\t\t4096 (4)", "active_mtu"),
        ("port_lid:\t\t17\n", "port_lid:\t\t17", "port_lid"),
    ]:
        facts, warnings = answer_ibv_devinfo(ONE.replace(said, damaged))
        assert facts["devices"][0]["ports"][0][key] is None and warnings


def test_a_number_at_the_end_of_a_cut_text_is_not_believed():
    facts, warnings = answer_ibv_devinfo(ONE[: ONE.index("port_lid:\t\t17") + len("port_lid:\t\t1")])
    assert facts["devices"][0]["ports"][0]["port_lid"] is None
    assert any("no line end" in warning for warning in warnings)


def test_lost_headers_give_no_facts_to_another_device():
    lines = TWO.splitlines(keepends=True)
    for lost in ("hca_id:\tmlx5_1\n", "\t\tport:\t2\n"):
        facts, warnings = answer_ibv_devinfo("".join(line for line in lines if line != lost))
        assert facts["devices"][0] == answer_ibv_devinfo(ONE)[0]["devices"][0] and warnings
        lids = [port["port_lid"] for device in facts["devices"] for port in device["ports"]]
        assert lids == (["17"] if "hca" in lost else ["17", "18"])


def test_contradictions_between_lines_are_named():
    for text, said in [
        (ONE.replace("phys_port_cnt:\t\t\t1", "phys_port_cnt:\t2"), "has 2 ports but 1 are printed"),
        (ONE.replace("max_mtu:\t\t4096 (5)", "max_mtu:\t2048 (4)"), "line 11: mlx5_0: an MTU of 4096 where 2048"),
        (ONE.replace("sm_lid:\t\t\t3", "sm_lid:\t0"), "has lids"),
        (ONE.replace("layer:\t\tInfiniBand", "layer:\tEthernet"), "no subnet manager on Ethernet"),
        (ONE + ONE, "line 20: mlx5_0 is printed a second time"),
        (ONE.replace("\tboard_id", "...\n\tboard_id"), "line 9: not part of a device: '...'"),
    ]:
        assert said in "".join(answer_ibv_devinfo(text)[1])


@settings(deadline=None)
@given(st.integers(1, len(TWO) - 1))
def test_a_text_that_is_cut_states_nothing_new(size):
    try:
        facts, warnings = answer_ibv_devinfo(TWO[:size])
    except CheckFailedError:
        return
    assert warnings or TWO[:size].strip() in (ONE.strip(), TWO.strip())
    for device, right in zip(facts["devices"], answer_ibv_devinfo(TWO)[0]["devices"], strict=False):
        assert all(value in (None, right[key]) for key, value in device.items() if key not in ("ports", "hca_id"))
        for port, right_port in zip(device["ports"], right["ports"], strict=False):
            assert all(value in (None, right_port[key]) for key, value in port.items())


@settings(deadline=None)
@given(st.text(max_size=60), st.integers(0, len(TWO)))
def test_any_text_is_read_or_refused(text, place):
    answer_ibv_devinfo(ONE + text + TWO[place:])
    with pytest.raises(CheckFailedError):
        answer_ibv_devinfo(text)

"""Listings of files below /sys and their damages; texts written here after the kernel's formats."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.topology.readers.sysfs import answer_sysfs, parse_sysfs

LISTING = """\
/sys/class/net/ib0 -> ../../devices/pci0000:40/0000:40:03.0/0000:43:00.0/net/ib0
/sys/devices/pci0000:40/0000:40:03.0/0000:43:00.0/class: 0x020700
/sys/devices/pci0000:40/0000:40:03.0/0000:43:00.0/device: 0x101b
/sys/devices/pci0000:40/0000:40:03.0/0000:43:00.0/local_cpulist: 2-3
/sys/devices/pci0000:40/0000:40:03.0/0000:43:00.0/local_cpus: 0000000c
/sys/devices/pci0000:40/0000:40:03.0/0000:43:00.0/numa_node: 5
/sys/devices/pci0000:40/0000:40:03.0/0000:43:00.0/vendor: 0x15b3
/sys/devices/pci0000:40/0000:40:03.0/0000:44:00.0/class: 0x030200
/sys/devices/pci0000:40/0000:40:03.0/0000:44:00.0/device: 0x20b0
/sys/devices/pci0000:40/0000:40:03.0/0000:44:00.0/local_cpulist: 0-3
/sys/devices/pci0000:40/0000:40:03.0/0000:44:00.0/local_cpus: 0000000f
/sys/devices/pci0000:40/0000:40:03.0/0000:44:00.0/numa_node: -1
/sys/devices/pci0000:40/0000:40:03.0/0000:44:00.0/vendor: 0x10de
/sys/devices/system/cpu/cpu0/topology/core_id: 0
/sys/devices/system/cpu/cpu0/topology/thread_siblings_list: 0-1
/sys/devices/system/cpu/cpu1/topology/core_id: 0
/sys/devices/system/cpu/cpu1/topology/thread_siblings_list: 0-1
/sys/devices/system/cpu/cpu2/topology/core_id: 1
/sys/devices/system/cpu/cpu2/topology/thread_siblings_list: 2-3
/sys/devices/system/cpu/cpu3/topology/core_id: 1
/sys/devices/system/cpu/cpu3/topology/thread_siblings_list: 2-3
/sys/devices/system/cpu/online: 0-3
/sys/devices/system/node/node0/cpulist: 0-1
/sys/devices/system/node/node0/cpumap: 00000003
/sys/devices/system/node/node0/distance: 10 21
/sys/devices/system/node/node0/meminfo: Node 0 MemTotal:        8386460 kB
/sys/devices/system/node/node5/cpulist: 2-3
/sys/devices/system/node/node5/cpumap: 0000000c
/sys/devices/system/node/node5/distance: 21 10
/sys/devices/system/node/node5/meminfo: Node 5 MemTotal:        8386461 kB
/sys/devices/system/node/online: 0,5
"""
PORTS = """\
/sys/class/infiniband/mlx5_0/board_id: MT_1
/sys/class/infiniband/mlx5_0/fw_ver: 28.1
/sys/class/infiniband/mlx5_0/hca_type: MT4129
/sys/class/infiniband/mlx5_0/ports/1/link_layer: InfiniBand
/sys/class/infiniband/mlx5_0/ports/1/phys_state: 5: LinkUp
/sys/class/infiniband/mlx5_0/ports/1/rate: 400 Gb/sec (4X NDR)
/sys/class/infiniband/mlx5_0/ports/1/state: 4: ACTIVE
"""


def test_nodes_processors_and_devices():
    facts, warnings = answer_sysfs(LISTING)
    assert warnings == ()
    assert facts == {
        "numa_nodes": 2,
        "nodes": {
            "0": {"cpulist": "0-1", "cpumap": "00000003", "distance": "10 21"},
            "5": {"cpulist": "2-3", "cpumap": "0000000c", "distance": "21 10"},
        },
        "pci_devices": 2,
        "gpus": ["0000:44:00.0"],
        "mellanox": ["0000:43:00.0"],
        "numa_node_minus_one": 1,
    }
    nodes = parse_sysfs(LISTING)[0].nodes
    assert nodes is not None and nodes[5].memory_kib == 8386461 and nodes[5].distances == (21, 10)


def test_ports_alone_say_nothing_of_nodes():
    facts, warnings = parse_sysfs(PORTS)
    assert (facts.nodes, facts.pci_devices, warnings) == (None, None, ())
    (device,) = facts.infiniband
    (port,) = device.ports
    assert device.name == "mlx5_0"
    assert (port.state, port.physical_state, port.rate_gbit_per_s, port.link_layer) == (
        "ACTIVE",
        "LinkUp",
        400,
        "InfiniBand",
    )
    assert set(answer_sysfs(PORTS)[0].values()) == {None}


def test_what_grep_prints_has_no_blank():
    assert answer_sysfs(LISTING.replace(": ", ":").replace("MemTotal:", "MemTotal: ")) == answer_sysfs(LISTING)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("400 Gb/sec (4X NDR)", "400 Gb/s", "line 6: expected the rate of a port"),
        ("4: ACTIVE", "ACTIVE", "line 7: expected the state of a port"),
        ("InfiniBand\n", "Infini\n", "line 4: expected the link layer of a port"),
        ("ports/1/state: 4: ACTIVE\n", "ports/1: x\n", "line 4: file state of port 1 of mlx5_0 not found"),
    ],
)
def test_damage_of_a_port_is_named(old, new, said):
    assert old in PORTS
    _, warnings = parse_sysfs(PORTS.replace(old, new, 1))
    assert any(said in warning for warning in warnings), warnings


@pytest.mark.parametrize("text", ["", "Hello\n", "/proc/cpuinfo: x\n"])
def test_what_is_no_listing_is_refused(text):
    with pytest.raises(ToolkitError, match=r"expected the output of grep -r \. /sys"):
        parse_sysfs(text)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([LISTING, PORTS]), st.integers(0, 2000), st.integers(0, 60), st.text(max_size=5))
def test_no_damage_raises_anything_else(text, start, length, between):
    try:
        _, warnings = answer_sysfs(text[:start] + between + text[start + length :])
    except ToolkitError:
        return
    assert all(warning.startswith("line ") for warning in warnings)

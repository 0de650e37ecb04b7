"""What is set for ranks, and what is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.topology.nccl.node import AdapterPort, FabricNode, read_default_route, read_ports
from toolkit.topology.nccl.settings import fabric_settings


def port(name: str, rate: float | None = 400.0, *, number: int = 1, active: bool | None = True) -> AdapterPort:
    return AdapterPort(name, number, active, rate, "InfiniBand")


NODE = FabricNode(
    nodes=2, gpus=8, interface="ib0", interfaces=("lo", "eth0", "ib0", "docker0"), default_route="eth0",
    ports=(port("mlx5_0"), port("mlx5_1"), port("mlx5_2", 25.0)),
)  # fmt: skip


def values(node: FabricNode, **given: str) -> dict[str, str]:
    return {one.name: one.value for one in fabric_settings(node, given) if one.kept is None}


def test_a_node_with_a_slow_adapter_beside_fast_ones():
    assert values(NODE) == {
        "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0", "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_DEBUG": "WARN",
    }  # fmt: skip
    for setting in fabric_settings(NODE, {}):
        assert setting.reason and setting.source.startswith("https://")
    (adapters,) = (one for one in fabric_settings(NODE, {}) if one.name == "NCCL_IB_HCA")
    assert "mlx5_2:1 (25 Gbit/s): slower than other adapters (400 Gbit/s)" in adapters.reason


def test_what_is_set_is_kept_and_said_so():
    settings = fabric_settings(NODE, {"NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": ""})
    kept = {setting.name: setting for setting in settings if setting.kept is not None}
    assert kept.keys() == {"NCCL_IB_HCA", "NCCL_DEBUG"}
    assert kept["NCCL_IB_HCA"].line.startswith(
        "NCCL_IB_HCA=mlx5 is already set, so toolkit does not set =mlx5_0,mlx5_1"
    )


@pytest.mark.parametrize(
    "ports",
    [
        None, (), (port("mlx5_0"),), (port("mlx5_0"), port("mlx5_1")), (port("mlx5_0"), port("mlx5_1", 200.5)),
        (port("mlx5_0"), port("mlx5_1", None)), (port("mlx5_0"), port("mlx5_1", 10.0, active=False)),
        (port("mlx5_0"), port("mlx5_1", 10.0, active=None)),
    ],
)  # fmt: skip
def test_adapters_that_are_alike_down_or_unknown_are_left_to_nccl(ports):
    assert "NCCL_IB_HCA" not in values(replace(NODE, ports=ports))


def test_of_an_adapter_with_a_slow_port_the_fast_one_is_named():
    ports = (port("mlx5_0"), port("mlx5_0", 25.0, number=2), port("mlx5_1"))
    assert values(replace(NODE, ports=ports))["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1"


def test_nothing_of_nccl_without_gpus_and_nothing_of_networks_on_one_node():
    assert values(replace(NODE, gpus=0)) == {"GLOO_SOCKET_IFNAME": "ib0"}
    alone = values(replace(NODE, nodes=1, interface="lo"))
    assert alone == {"GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_DEBUG": "WARN"}


def test_the_only_interface_is_left_to_nccl():
    assert "NCCL_SOCKET_IFNAME" not in values(replace(NODE, interfaces=("lo", "ib0", "docker0", "veth12")))


def test_ports_as_the_kernel_lists_them(tmp_path):
    folder = tmp_path / "class" / "infiniband"
    for name, state, rate in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "2.5 Gb/sec (1X)"),
        ("mlx5_10", "5: ACTIVE_DEFER", "200 Gb/sec (4X HDR)"),
    ):  # fmt: skip
        place = folder / name / "ports" / "1"
        place.mkdir(parents=True)
        for file, text in (("state", state), ("rate", rate), ("link_layer", "InfiniBand")):
            (place / file).write_text(text + "\n")
    (folder / "mlx5_2" / "ports" / "1").mkdir(parents=True)
    assert read_ports(tmp_path) == (
        AdapterPort("mlx5_0", 1, True, 400.0, "InfiniBand"), AdapterPort("mlx5_1", 1, False, None, "InfiniBand"),
        AdapterPort("mlx5_2", 1, None, None, None), AdapterPort("mlx5_10", 1, True, 200.0, "InfiniBand"),
    )  # fmt: skip
    assert read_ports(tmp_path / "none") is None


def test_the_default_route_with_the_least_metric(tmp_path):
    rows = ["Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT",
            "eth0 00000000 010200C0 0003 0 0 100 00000000 0 0 0", "ib0 00000000 010200C0 0003 0 0 50 00000000 0 0 0",
            "eth1 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0"]  # fmt: skip
    (tmp_path / "route").write_text("\n".join(rows) + "\n")
    assert read_default_route(tmp_path / "route") == "ib0"
    assert read_default_route(tmp_path / "none") == ""

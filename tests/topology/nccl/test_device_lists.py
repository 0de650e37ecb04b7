"""Lists of adapters and interfaces: prefixes, signs, and names that no device has."""

from __future__ import annotations

import pytest

from toolkit.topology.nccl.finding import Given
from toolkit.topology.nccl.lint import Here, lint

MANY = Here(adapters=("mlx5_0", "mlx5_1", "mlx5_10", "mlx5_11"), interfaces=("lo", "eth0", "eth1", "eth10"))


def check(name: str, value: str, here: Here | None = None):
    return [(found.level, found.why, found.fix) for found in lint([Given(name, value, "x")], None, here)]


def test_mlx5_1_also_means_mlx5_10():
    ((level, why, fix),) = check("NCCL_IB_HCA", "mlx5_0,mlx5_1")
    assert level == "wrong" and "mlx5_1 also matches mlx5_10 to mlx5_19" in why and fix == "NCCL_IB_HCA==mlx5_0,mlx5_1"
    ((level, why, _),) = check("NCCL_IB_HCA", "mlx5_1:1", MANY)
    assert level == "wrong" and "mlx5_1 also matches mlx5_10, mlx5_11" in why


def test_where_the_node_has_no_other_it_is_a_note():
    ((level, why, _),) = check("NCCL_IB_HCA", "mlx5_1", Here(adapters=("mlx5_0", "mlx5_1")))
    assert (level, why) == ("note", "each name is a prefix; on this node it matches no other device")


def test_an_excluded_prefix_excludes_more():
    ((level, _, fix),) = check("NCCL_IB_HCA", "^mlx5_1")
    assert (level, fix) == ("wrong", "NCCL_IB_HCA=^=mlx5_1")


@pytest.mark.parametrize(
    "value", ["mlx5", "=mlx5_0,mlx5_1", "^=mlx5_1,mlx5_4", "=mlx5_0:1:0:0,mlx5_1:1:0:1", "mlx5_bond"]
)
def test_what_the_page_shows_is_fine(value):
    assert check("NCCL_IB_HCA", value) == []


@pytest.mark.parametrize(
    ("value", "fixed"),
    [("=mlx5_0,=mlx5_1", "=mlx5_0,mlx5_1"), ("=^mlx5_1", "^=mlx5_1"), ("=mlx5_0, mlx5_1", "=mlx5_0,mlx5_1"),
     ("^mlx5_0,^mlx5_1", "^mlx5_0,mlx5_1"), ("=mlx5_0 mlx5_1", "=mlx5_0,mlx5_1")],
)  # fmt: skip
def test_signs_and_spaces_inside_a_list(value, fixed):
    ((level, _, fix),) = check("NCCL_IB_HCA", value)
    assert (level, fix) == ("wrong", f"NCCL_IB_HCA={fixed}")


def test_interfaces():
    assert check("NCCL_SOCKET_IFNAME", "eth") == check("NCCL_SOCKET_IFNAME", "=eth0,eth1") == []
    assert check("NCCL_SOCKET_IFNAME", "^docker,lo") == []
    ((level, why, _),) = check("NCCL_SOCKET_IFNAME", "eth1", MANY)
    assert level == "wrong" and "eth1 also matches eth10" in why
    assert check("NCCL_SOCKET_IFNAME", "hsn0,hsn1")[0][0] == "note"


def test_a_name_that_nothing_has_is_wrong_where_the_ranks_run():
    ((level, why, _),) = check("NCCL_IB_HCA", "=mlx5_7", Here(adapters=("mlx5_0",), sure=True))
    assert level == "wrong" and "the node has no device mlx5_7 (it has mlx5_0)" in why
    assert check("NCCL_IB_HCA", "=mlx5_7", Here(adapters=("mlx5_0",)))[0][0] == "note"


def test_a_login_node_without_adapters_hides_no_prefix():
    assert [level for level, *_ in check("NCCL_IB_HCA", "mlx5_1", Here(adapters=()))] == ["wrong"]


def test_gloo_takes_whole_names():
    ((level, why, fix),) = check("GLOO_SOCKET_IFNAME", "=eth0")
    assert (level, fix) == ("wrong", "GLOO_SOCKET_IFNAME=eth0") and "'=eth0'" in why
    assert check("GLOO_SOCKET_IFNAME", "eth0", MANY) == []
    assert check("GLOO_SOCKET_IFNAME", "ib0", MANY)[0][0] == "note"

"""Variables that make one another void."""

from __future__ import annotations

import re

import pytest

from toolkit.topology.nccl.finding import Given
from toolkit.topology.nccl.lint import lint
from toolkit.topology.nccl.variables import rules, variables


def check(text: str, version=(2, 27, 7)) -> dict[str, str]:
    givens = [Given(*word.split("=", 1), "x") for word in text.split()]
    return {found.variable: f"{found.level}: {found.why}" for found in lint(givens, version)}


@pytest.mark.parametrize(
    ("text", "about", "why"),
    [
        ("NCCL_IB_DISABLE=1 NCCL_IB_HCA==mlx5_0", "NCCL_IB_HCA", "no effect with NCCL_IB_DISABLE=1"),
        ("NCCL_IB_DISABLE=1 NCCL_NET=IB", "NCCL_NET", "the job fails"),
        ("NCCL_NET=Socket NCCL_NET_GDR_LEVEL=SYS", "NCCL_NET_GDR_LEVEL", "no effect with NCCL_NET=Socket"),
        ("NCCL_P2P_DISABLE=1 NCCL_P2P_LEVEL=NVL", "NCCL_P2P_LEVEL", "no effect with NCCL_P2P_DISABLE=1"),
        ("NCCL_MIN_CTAS=32 NCCL_MAX_CTAS=8", "NCCL_MIN_CTAS", "above NCCL_MAX_CTAS=8"),
        ("NCCL_MAX_CTAS=8 NCCL_MAX_NCHANNELS=16", "NCCL_MAX_NCHANNELS", "the narrower bound applies"),
        ("NCCL_MAX_CTAS=2", "NCCL_MAX_CTAS", "limit the bandwidth"),
        ("NCCL_SOCKET_NTHREADS=16 NCCL_NSOCKS_PERTHREAD=8", "NCCL_NSOCKS_PERTHREAD", "is 128, and the limit is 64"),
        ("NCCL_BUFFSIZE=4096", "NCCL_BUFFSIZE", "disables adaptive routing"),
        ("NCCL_IB_PKEY=3 NCCL_IB_PKEY_VALUE=0x8111", "NCCL_IB_PKEY", "NCCL_IB_PKEY_VALUE"),
        ("NCCL_MNNVL_ENABLE=1 NCCL_CUMEM_ENABLE=0", "NCCL_MNNVL_ENABLE", "needs cuMem"),
        ("NCCL_NVLS_ENABLE=1 NCCL_MULTI_RANK_GPU_ENABLE=1", "NCCL_NVLS_ENABLE", "share a GPU"),
        ("NCCL_GRAPH_STREAM_ORDERING=0 NCCL_GRAPH_MIXING_SUPPORT=1", "NCCL_GRAPH_STREAM_ORDERING", "not supported"),
        ("NCCL_OOB_NET_IFNAME==mlx5_1", "NCCL_OOB_NET_IFNAME", "without NCCL_OOB_NET_ENABLE=1"),
        ("NCCL_ALGO=NVLS NCCL_NVLS_ENABLE=0", "NCCL_ALGO", "NCCL_NVLS_ENABLE=0 disables NVLS"),
        ("NCCL_DEBUG_SUBSYS=NET NCCL_DEBUG=WARN", "NCCL_DEBUG_SUBSYS", "no effect without NCCL_DEBUG=INFO"),
        ("NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/log", "NCCL_DEBUG_FILE", "overwrite the same file"),
        (
            "NCCL_IB_GID_INDEX=3 NCCL_IB_ROCE_VERSION_NUM=2",
            "NCCL_IB_ROCE_VERSION_NUM",
            "only if NCCL_IB_GID_INDEX is not set",
        ),
    ],
)
def test_each(text, about, why):
    said = check(text, (2, 32, 3))
    assert why in said.get(about, ""), said


def test_a_hard_coded_gid_is_wrong_from_221_on():
    assert check("NCCL_IB_GID_INDEX=3")["NCCL_IB_GID_INDEX"].startswith("wrong: the GID table differs")
    assert check("NCCL_IB_GID_INDEX=3", (2, 20, 5))["NCCL_IB_GID_INDEX"].startswith("note: ")
    assert "NCCL_IB_GID_INDEX" not in check("NCCL_IB_GID_INDEX=-1")


def test_what_goes_together_is_fine():
    assert check("NCCL_NET=IB NCCL_IB_HCA==mlx5_0,mlx5_1 NCCL_SOCKET_IFNAME==ib0 NCCL_DEBUG=WARN") == {}
    assert check("NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/log.%h.%p").keys() == {"NCCL_DEBUG"}


def test_a_value_that_is_misread_contradicts_nothing_beside():
    said = check("NCCL_IB_DISABLE=true NCCL_IB_HCA==mlx5_0")
    assert said.keys() == {"NCCL_IB_DISABLE"}


def test_an_undocumented_name_beside_a_disabled_network_is_only_a_note():
    assert check("NCCL_IB_DISABLE=1 NCCL_IB_FROBNICATE=1")["NCCL_IB_FROBNICATE"].startswith("note: ")


def test_rules_name_variables_of_the_table():
    for rule in rules():
        named = {*rule.variables, *re.findall("NCCL_[A-Z0-9_]+", " ".join((*rule.when, *rule.advice)))}
        assert {name for name in named if "*" not in name} <= variables().keys(), rule

"""A value that NCCL reads as something else is named with what NCCL reads, and what to write."""

from __future__ import annotations

import pytest

from toolkit.topology.nccl.finding import Given
from toolkit.topology.nccl.lint import lint
from toolkit.topology.nccl.values import as_c_reads, check_value
from toolkit.topology.nccl.variables import variables

NEW = (2, 27, 7)


def problem(name: str, value: str, version=NEW) -> tuple[str, str]:
    (found,) = check_value(Given(name, value, "here"), variables()[name], version)
    assert found.level == "wrong" and found.source.startswith("https://") and found.does
    return found.why, found.fix


@pytest.mark.parametrize(
    ("text", "read"),
    [("4M", 4), ("true", 0), ("0x10", 16), ("010", 8), ("-3", -3), (" 7", 7), ("", 0), ("08", 0), ("9" * 5000, 0)],
)
def test_numbers_are_read_as_c_reads_them(text, read):
    assert as_c_reads(text) == read or (len(text) > 99 and as_c_reads(text) >= 1 << 63)


@pytest.mark.parametrize(
    ("name", "value", "why", "fix"),
    [
        ("NCCL_IB_DISABLE", "true", "'true' as 0", "NCCL_IB_DISABLE=1"),
        ("NCCL_BUFFSIZE", "8M", "reads '8M' as 8 bytes", "NCCL_BUFFSIZE=8388608"),
        ("NCCL_BUFFSIZE", "8 MiB", "as 8 bytes", "NCCL_BUFFSIZE=8388608"),
        ("NCCL_IB_QPS_PER_CONNECTION", "200", "200 is out of range", "set 1 to 128"),
        ("NCCL_IB_QPS_PER_CONNECTION", "010", "octal: NCCL reads 010 as 8", "NCCL_IB_QPS_PER_CONNECTION=10"),
        ("NCCL_IB_QPS_PER_CONNECTION", "9" * 5000, "does not fit into 64 bits", "set 1 to 128"),
        ("NCCL_NTHREADS", "300", "300 is out of range", "set one of 64, 128, 256, 512"),
        ("NCCL_IB_TIMEOUT", "0", "hangs forever", "1 to 31"),
        ("NCCL_IB_TIMEOUT", "32", "hangs forever", "1 to 31"),
        ("NCCL_IB_RETRY_CNT", "13", "13 is out of range", "set 0 to 7"),
        ("NCCL_P2P_LEVEL", "2", "today 2 is PXB", "NCCL_P2P_LEVEL=PXB"),
        ("NCCL_P2P_LEVEL", "9", "today 9 is SYS", "NCCL_P2P_LEVEL=SYS"),
        ("NCCL_NET_GDR_LEVEL", "NODE", "a level of `nvidia-smi topo -m`", "PHB for the same NUMA node"),
        ("NCCL_NET_GDR_LEVEL", "phb", "is case-sensitive", "NCCL_NET_GDR_LEVEL=PHB"),
        ("NCCL_NET_GDR_LEVEL", "NVL", "so NVL means never", "LOC, PIX, PXB, PHB, SYS"),
        ("NCCL_DEBUG", "INOF", "does not know 'INOF'", "did you mean INFO?"),
        ("NCCL_DEBUG_SUBSYS", "INIT,NTE", "does not know 'NTE'", "did you mean NET?"),
        ("NCCL_SOCKET_FAMILY", "IPv4", "does not know 'IPv4'", "AF_INET, AF_INET6"),
        ("NCCL_ALGO", "Rng", "does not know 'Rng'", "did you mean ring?"),
        ("NCCL_ALGO", "allreduse:tree", "'allreduse' is not a function of NCCL", "allreduce"),
        ("NCCL_PROTO", "LL129", "does not know 'LL129'", "LL, LL128, Simple"),
        ("NCCL_IB_ADDR_RANGE", "10.0.0/8", "not a valid address range", "10.0.0.0/8"),
        ("NCCL_CONF_FILE", "~/nccl.conf", "does not expand ~", "the whole path"),
        ("NCCL_NETDEVS_POLICY", "MAX", "does not know 'MAX'", "MAX:N"),
        ("NCCL_CTA_POLICY", "FAST", "does not know 'FAST'", "EFFICIENCY"),
        ("NCCL_RAS_TIMEOUT_FACTOR", "-1", "expected a number above 0", "such as 2"),
        ("NCCL_MNNVL_UUID", "rack7", "expected an integer", "decimal or 0x"),
    ],
)
def test_what_is_misread_is_named_with_the_fix(name, value, why, fix):
    said = problem(name, value)
    assert why in said[0] and fix in said[1], said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_IB_DISABLE", "0"), ("NCCL_IB_DISABLE", ""), ("NCCL_BUFFSIZE", "8388608"), ("NCCL_P2P_LEVEL", "NVL"),
        ("NCCL_DEBUG", "info"), ("NCCL_DEBUG_SUBSYS", "^NET,ENV"), ("NCCL_IB_GID_INDEX", "-1"), ("NCCL_NET", "ofi"),
        ("NCCL_ALGO", "ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring"),
        ("NCCL_ALGO", "allreduce:^tree"),
        ("NCCL_PROTO", "^LL128"), ("NCCL_CTA_POLICY", "EFFICIENCY|ZERO"), ("NCCL_NETDEVS_POLICY", "MAX:2"),
        ("NCCL_IB_PKEY_VALUE", "0x8111"), ("NCCL_IB_ADDR_RANGE", "10.1.0.0/16"), ("NCCL_IB_RAIL_POLICY", "CX9:FLIP"),
    ],
)  # fmt: skip
def test_what_the_page_allows_is_fine(name, value):
    assert check_value(Given(name, value, "here"), variables()[name], NEW) == []


def test_algorithms_for_functions_need_a_version_that_reads_them():
    assert "since 2.24" in problem("NCCL_ALGO", "allreduce:tree", (2, 21, 5))[0]


def test_a_key_is_never_printed():
    (found,) = lint([Given("NCCL_PSK", "hunter2", "here")], None)
    assert "hunter2" not in "\n".join(found.lines()) and "fewer than 32 characters" in found.why


def test_control_characters_do_not_reach_the_terminal():
    (found,) = lint([Given("NCCL_DEBUG", "INFO\x1b[2J\n", "here")], None)
    assert all(line.isprintable() for line in found.lines())

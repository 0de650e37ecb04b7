"""Variables that the NCCL in use does not know, or no more, or that are there to find faults."""

from __future__ import annotations

import pytest

from toolkit.topology.nccl.finding import Finding, Given
from toolkit.topology.nccl.lint import lint
from toolkit.topology.nccl.variables import is_before, newest_release, parse_version, variables


def check(name: str, value: str = "1", version: str | None = "2.27.7") -> Finding:
    (found,) = lint([Given(name, value, "job.env:3")], parse_version(version, "test") if version else None)
    return found


@pytest.mark.parametrize(
    ("name", "value", "version", "why", "fix"),
    [
        ("NCCL_IB_TIMEOT", "22", "2.27.7", "does not have this variable", "did you mean NCCL_IB_TIMEOUT"),
        ("NCLL_FROBNICATE", "1", "2.27.7", "does not have this variable", "remove this variable"),
        ("NCCL_P2P_DISABLED", "1", "2.27.7", "does not have this variable", "did you mean NCCL_P2P_DISABLE ("),
        ("NCLL_DEBUG", "INFO", "2.27.7", "does not have this variable", "did you mean NCCL_DEBUG"),
        ("nccl_debug", "INFO", "2.27.7", "uppercase", "NCCL_DEBUG=INFO"),
        ("NCCL_LL_THRESHOLD", "0", "2.27.7", "removed in NCCL 2.5", "remove this variable"),
        ("NCCL_TREE_THRESHOLD", "0", "2.27.7", "removed in NCCL 2.5", "remove this variable"),
        ("NCCL_IB_GDR_LEVEL", "PHB", "2.27.7", "replaced by NCCL_NET_GDR_LEVEL in NCCL 2.4", "NCCL_NET_GDR_LEVEL=PHB"),
        ("NCCL_IB_CUDA_SUPPORT", "0", "2.27.7", "replaced by NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_LEVEL=LOC"),
        ("NCCL_MNNVL", "1", "2.27.7", "in NCCL 2.21", "NCCL_MNNVL_ENABLE=1"),
        (
            "NCCL_ASYNC_ERROR_HANDLING",
            "1",
            "2.27.7",
            "torch 2.2 renamed this variable",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
        ),
        (
            "NCCL_CTA_POLICY",
            "ZERO",
            "2.21.5",
            "available since NCCL 2.27, but the NCCL in use is 2.21.5",
            "NCCL 2.27 or newer",
        ),
        ("NCCL_P2P_DISABLE", "1", "2.27.7", "NVLink is unused", "remove this variable"),
        ("NCCL_ALGO", "Ring", "2.27.7", "for debugging only", "remove this variable"),
        ("NCCL_DEBUG", "TRACE", "2.27.7", "every call", "NCCL_DEBUG=WARN"),
    ],
)
def test_wrong(name, value, version, why, fix):
    found = check(name, value, version)
    assert found.level == "wrong" and why in found.why and fix in found.fix, found
    assert (found.where, found.source[:8]) == ("job.env:3", "https://")


@pytest.mark.parametrize(
    ("name", "value", "version", "why"),
    [
        ("NCCL_MAX_NCHANNELS", "8", "2.27.7", "in favor of NCCL_MAX_CTAS"),
        ("NCCL_NCHANNELS_PER_NET_PEER", "4", "2.27.7", "not documented in NCCL 2.32"),
        ("NCCL_FROBNICATE", "1", "2.27.7", "not documented in NCCL 2.32"),
        ("NCCL_GIN_ENABLE", "1", "2.32.3", "not documented in NCCL 2.32"),
        ("NCCL_IB_MERGE_VFS", "1", None, "not documented in NCCL 2.32"),
        ("NCCL_FROBNICATE", "1", "2.40.1", "the NCCL in use, 2.40.1, is newer"),
        ("NCCL_DEBUG", "INFO", "2.27.7", "several hundred lines"),
        ("NCCL_CROSS_NIC_", "1", "2.40.1", ""),
        ("NCCL_NVLS_ENABLE", "2", "2.27.7", "the default"),
        ("NCCL_P2P_DISABLE", "0", "2.27.7", "the default"),
        ("NCCL_NET_GDR_LEVEL", "PHB", "2.27.7", "a later NCCL may choose a better value"),
    ],
)
def test_good_to_know(name, value, version, why):
    found = check(name, value, version)
    assert why in found.why and (found.level == "note") == bool(why), found


def test_an_old_nccl_still_reads_what_is_gone_later():
    assert lint([Given("NCCL_LL_THRESHOLD", "", "x")], (2, 4, 8)) == []
    assert check("NCCL_LL_THRESHOLD", "16384", "2.4.8").why.startswith("for debugging only")


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.21.5", (2, 21, 5)), ("2.31.2+cuda12.9", (2, 31, 2)), ("2.26.2.post1", (2, 26, 2)), ("22105", (2, 21, 5)),
     ("2804", (2, 8, 4)), ("2.31", (2, 31))],
)  # fmt: skip
def test_versions(text, version):
    assert parse_version(text, "test") == version


def test_a_version_without_its_last_part_is_any_of_them():
    assert not is_before((2, 24, 3), (2, 24)) and is_before((2, 23, 4), (2, 24)) and not is_before(None, (2, 24))


def test_the_table_is_whole():
    table, newest = variables(), newest_release()
    documented = [known for known in table.values() if known.kind not in ("undocumented", "torch")]
    assert len(documented) >= 125 and len(table) == len({known.name for known in table.values()})
    for known in table.values():
        assert known.does and known.name.startswith("NCCL_") and known.kind
        assert known.since <= (newest[0], newest[1] + 1)
        assert not known.now or known.now in table or known.now.startswith("TORCH_NCCL_")
        default = Given(known.name, known.default, "table")
        assert not [f for f in lint([default], None) if "range" in f.why or "does not know" in f.why], known


def test_a_similar_documented_name_is_proposed_for_an_unknown_one():
    assert "did you mean NCCL_IB_MERGE_NICS" in check("NCCL_IB_MERGE_VFS").fix
    assert check("NCCL_FROBNICATE").fix.startswith("check its name")

"""What ranks of a probe report, and which finding follows."""

import copy

import pytest
from slurm_of_a_site import NODES, PARTITIONS

from toolkit.config.site import PartitionTable, Site
from toolkit.site.findings import Probe, judge_limits, judge_reports
from toolkit.slurm.cluster import node_of
from toolkit.slurm.limits import limits_of
from toolkit.slurm.records import show_fields

PROBE = Probe("gpu", 2, 2, 2, "token", "/scratch")
GOOD = [
    {
        "rank": rank, "host": f"g{rank // 2}", "gpus": {"visible": 2, "driver": 2}, "interfaces": ["eth0", "ib0"],
        "shared": "token", "clock_s": 100.0 + rank / 100, "rate_mb_per_s": 900.0 if rank == 0 else 0.0,
        "mpi": {"size": 4, "sum": 6, "library": "Open MPI v5", "path": "/lib/libmpi.so.40", "error": ""},
    }
    for rank in range(4)
]  # fmt: skip
SITE = Site(name="ours", network={"interface": "ib0"})


def failed(reports, probe=PROBE):
    return {one.check: one for one in judge_reports(probe, SITE, reports) if one.state == "failed"}


def test_a_good_site_passes_every_check():
    found = judge_reports(PROBE, SITE, GOOD)
    assert [one.check for one in found] == ["ranks", "mpi", "libmpi", "gpus", "network", "shared_path", "clocks"]
    assert {one.state for one in found} == {"passed"}
    assert "900 MB/s" in found[4].detail


@pytest.mark.parametrize(
    ("rank", "change", "check", "detail", "fix"),
    [
        (3, {"host": "g0"}, None, "", ""),
        (2, {"gpus": {"visible": 8}}, None, "", ""),  # the whole node was given
        (2, {"mpi": {"size": 1}}, "mpi", "rank 2: MPI reports 1 ranks, but the job has 4", "launcher.mpi"),
        (1, {"mpi": {"sum": 7}}, "mpi", "expected the sum 6 over the ranks, got 7", "launcher.mpi"),
        (0, {"mpi": {"error": "no MPI"}}, "mpi", "rank 0: no MPI", "`srun --mpi=list`"),
        (3, {"mpi": {"library": "MPICH 4"}}, "libmpi", "MPICH 4, Open MPI v5", "launcher.libmpi"),
        (
            2,
            {"gpus": {"visible": 0}},
            "gpus",
            "g1 has 0 of 2 requested GPUs",
            "fix gpu.request, now '--gpus-per-node={count}'",
        ),
        (2, {"gpus": {"driver": 1}}, "gpus", "the driver reports 1 GPUs", "administrators"),
        (3, {"interfaces": ["hsn0"]}, "network", "g1 does not have an interface ib0", 'set network.interface = "hsn0"'),
        (0, {"rate_mb_per_s": 0.0}, "network", "no data could be sent", "network.vars"),
        (3, {"shared": ""}, "shared_path", "g1 cannot read the file that rank 0 wrote in /scratch", "paths.scratch"),
        (3, {"clock_s": 160.0}, "clocks", "differ by 60 s", "chronyc"),
    ],
)
def test_what_is_wrong_is_found(rank, change, check, detail, fix):
    reports = copy.deepcopy(GOOD)
    for key, value in change.items():
        reports[rank][key] = {**reports[rank][key], **value} if isinstance(value, dict) else value
    found = failed(reports)
    if check is None:
        assert not found
        return
    assert list(found) == [check]
    assert detail in found[check].detail and fix in found[check].fix


def test_ranks_that_share_one_node_are_found():
    reports = [{**report, "host": "g0"} for report in GOOD]
    assert "2 nodes were requested" in failed(reports)["ranks"].detail


def test_one_node_and_no_gpus_are_skipped_not_failed():
    probe = Probe("cpu", 1, 2, 0, "token", "/scratch")
    reports = [{**report, "host": "n1", "mpi": {**report["mpi"], "size": 2, "sum": 1}} for report in GOOD[:2]]
    states = {one.check: one.state for one in judge_reports(probe, SITE, reports)}
    assert (states["gpus"], states["network"], states["ranks"]) == ("skipped", "skipped", "passed")


def live(name):
    nodes = [node_of(block) for block in show_fields(NODES, "NodeName")[0]]
    partitions = [limits_of(block) for block in show_fields(PARTITIONS, "PartitionName")[0]]
    return next(one for one in partitions if one.name == name), [node for node in nodes if name in node.partitions]


@pytest.mark.parametrize(
    ("said", "detail", "fix"),
    [
        ({"max_nodes": 2, "max_time": "2-00:00:00", "cpus_per_node": 126}, "", ""),
        ({"max_nodes": 3}, "max_nodes = 3, but Slurm has 2", "max_nodes = 2"),
        ({"max_time": "3-00:00:00"}, "max_time = 3-00:00:00, but Slurm allows 2-00:00:00", 'max_time = "2-00:00:00"'),
        ({"max_time": "UNLIMITED"}, "max_time = UNLIMITED", 'max_time = "2-00:00:00"'),
        ({"gpus_per_node": 4}, "gpus_per_node = 4, but Slurm has 0", "gpus_per_node = 0"),
        (
            {"cpus_per_node": 128, "mem_gb_per_node": 256},
            "mem_gb_per_node = 256, but Slurm has 250",
            "cpus_per_node = 126",
        ),
    ],
)
def test_limits_that_slurm_does_not_give_are_found(said, detail, fix):
    found = judge_limits("cpu", PartitionTable(**said), *live("cpu"))
    assert found.state == ("failed" if detail else "passed")
    assert detail in found.detail and fix in found.fix


def test_a_partition_that_slurm_does_not_have_is_found():
    found = judge_limits("away", PartitionTable(), None)
    assert (found.state, found.fix) == ("failed", "remove [partitions.away] from the site file")

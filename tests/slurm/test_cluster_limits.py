"""What scontrol, sinfo and sacctmgr print of limits is read as Slurm means it; the texts are Slurm 22.05's."""

from __future__ import annotations

from datetime import datetime

import pytest

from toolkit.errors import SchedulerRefusedError
from toolkit.slurm.accounted_usage import accounted_usage
from toolkit.slurm.associations import QueuedJob, associations_of, default_account, every_qos, queued_jobs
from toolkit.slurm.commands import Slurm
from toolkit.slurm.limits import cluster_settings, every_partition, node_shapes, reservations
from toolkit.slurm.records import UnreadableError
from toolkit.slurm.sbatch_options import gpus_of, memory_mib, parse_tres, parse_weights

PARTITIONS = """\
PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=node[1-2] PriorityJobFactor=1 PriorityTier=10 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=16 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=16,mem=32000M,node=2,billing=16,gres/gpu=8
PartitionName=gpu AllowGroups=gpuusers DenyAccounts=old,older AllowQos=normal,long AllocNodes=ALL Default=NO QoS=part DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=YES MaxNodes=1 MaxTime=UNLIMITED MinNodes=2 LLN=NO MaxCPUsPerNode=6 Nodes=node2 PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=EXCLUSIVE OverTimeLimit=NONE PreemptMode=OFF State=DRAIN TotalCPUs=8 TotalNodes=1 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerCPU=2000 MaxMemPerNode=4000 TRESBillingWeights=CPU=1.0,Mem=0.25G,GRES/gpu=16
"""
CONFIG = """Configuration data as of 2026-11-22T15:00:00
AccountingStorageEnforce = associations,limits,qos
ClusterName             = here
GresTypes               = gpu
PriorityFlags           =
SchedulerParameters     = bf_interval=1,batch_sched_delay=0

Slurmctld(primary) at controller is UP
"""


@pytest.fixture
def slurm(fake_slurm):
    """Set what a command prints, with @ for the mark, or the error that it ends with."""

    def answer(command, text="", error=""):
        if error:
            fake_slurm.respond(command, stderr=f"{error}\n", code=1)
        else:
            fake_slurm.respond_marked(command, text)
        return Slurm()

    return answer


def test_partitions(slurm):
    found = every_partition(slurm("scontrol", PARTITIONS))
    main, gpu = found["main"], found["gpu"]
    assert (main.is_default, main.max_time_s, main.default_time_s, main.max_nodes, main.total_nodes) == (
        True,
        86400,
        600,
        None,
        2,
    )
    assert (main.allow_accounts, main.qos, main.billing_weights, main.max_memory_per_node_mib) == ((), "", {}, None)
    assert (gpu.max_time_s, gpu.default_time_s, gpu.max_nodes, gpu.min_nodes, gpu.state) == (None, None, 1, 2, "DRAIN")
    assert (gpu.deny_accounts, gpu.allow_qos, gpu.allow_groups, gpu.qos) == (
        ("old", "older"),
        ("normal", "long"),
        ("gpuusers",),
        "part",
    )
    assert (
        gpu.max_cpus_per_node,
        gpu.max_memory_per_node_mib,
        gpu.default_memory_per_cpu_mib,
        gpu.gives_whole_nodes,
    ) == (6, 4000, 2000, True)
    assert gpu.billing_weights == {"cpu": 1.0, "mem": 0.25 / 1024, "gres/gpu": 16.0}
    with pytest.raises(UnreadableError):
        every_partition(slurm("scontrol", "maintenance today\n"))


def test_settings(slurm):
    settings = cluster_settings(slurm("scontrol", CONFIG))
    assert settings["ClusterName"] == "here" and settings["PriorityFlags"] == ""
    assert settings["SchedulerParameters"] == "bf_interval=1,batch_sched_delay=0"
    with pytest.raises(UnreadableError):
        cluster_settings(slurm("scontrol", "welcome\n"))


def test_shapes_of_nodes(slurm):
    rows = "".join(f"{row}\n" for row in (
        "n[1-3]@3@128@515000@gpu:a100:4(S:0-1),gpu:v100:2@ib,nvme@mixed@n[1-3]@",
        "n4@1@64@257000@(null)@(null)@drained*@n4@",
    ))  # fmt: skip
    many, one = node_shapes(slurm("sinfo", rows), "main")
    assert (many.nodes, many.cpus, many.memory_mib, many.gpus, many.features, many.is_usable) == (
        3, 128, 515000, {"a100": 4, "v100": 2}, {"ib", "nvme"}, True,
    )  # fmt: skip
    assert (one.gpus, one.features, one.is_usable) == ({}, frozenset(), False)
    (held,) = node_shapes(slurm("sinfo", "n5@1@64@257000@(null)@(null)@reserved@n5@\n"), "main")
    assert held.is_usable and held.is_reserved


def test_a_reservation_and_none(slurm):
    text = "ReservationName=class StartTime=2026-11-22T15:16:53 EndTime=2026-11-22T15:24:53 Duration=00:08:00 Nodes=node2 NodeCnt=1 CoreCnt=8 Features=(null) PartitionName=main Flags=IGNORE_JOBS,SPEC_NODES TRES=cpu=8 Users=root Groups=(null) Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
    (found,) = reservations(slurm("scontrol", text), "class")
    assert (found.end, found.nodes, found.flags) == (
        datetime(2026, 11, 22, 15, 24, 53),
        1,
        ("IGNORE_JOBS", "SPEC_NODES"),
    )
    assert (found.users, found.accounts, found.groups) == (("root",), (), ())
    assert reservations(slurm("scontrol", error="Reservation class not found"), "class") == []
    with pytest.raises(SchedulerRefusedError):
        reservations(slurm("scontrol", error="Unable to contact slurm controller"), "class")


def test_accounts_and_qos(slurm):
    rows = "here|physics||normal,long|normal|4|100|1-00:00:00|node=8,gres/gpu=32|cpu=64|cpu=6000|mem=1.5T||50\nhere|maths|gpu|normal||||||||||\n"
    physics, maths = associations_of(slurm("sacctmgr", rows), "ada", "here")
    assert (physics.qos, physics.default_qos, maths.partition) == (("normal", "long"), "normal", "gpu")
    limits = physics.limits
    assert (limits.longest_s, limits.most_for_job, limits.running_jobs) == (86400, {"node": 8, "gres/gpu": 32}, 4)
    assert (limits.submitted_jobs, limits.submitted_jobs_of_group) == (100, 50)
    assert limits.most_of_group == {"mem": 1.5 * 1024**2}
    assert maths.limits.longest_s is None and maths.limits.submitted_jobs is None
    assert default_account(slurm("sacctmgr", "ada|physics\n"), "ada", "near") == "physics"
    assert default_account(slurm("sacctmgr", ""), "ada", "near") == ""
    assert every_qos(slurm("sacctmgr", "normal|OverPartQOS|node=2|cpu=5|||||||||\n"))["normal"].least_for_job == {
        "node": 2
    }
    with pytest.raises(UnreadableError):
        every_qos(slurm("sacctmgr", "Database is being upgraded\n"))


def test_lives_in_accounting(slurm):
    rows = [
        "22@COMPLETED@14@30@2@8@00:03.708@@billing=8,cpu=8,gres/gpu=4,mem=8G,node=2@22@",
        "22.batch@COMPLETED@14@@1@4@00:00.500@12000K@cpu=4,mem=4G,node=1@22.batch@",
        "22.0@COMPLETED@12@@2@8@00:03.200@329000K@cpu=8,mem=8G,node=2@22.0@",
        "22@REQUEUED@1000@30@2@8@1-02:03:04@@cpu=8,node=2@22@",
        "23_4@CANCELLED by 7@0@UNLIMITED@1@0@00:00:00@@@23_4@",
    ]
    first, second = accounted_usage(slurm("sacct", "".join(f"{row}\n" for row in rows)), ["22"])
    assert (first.elapsed_s, first.limit_s, first.nodes, first.cpus, first.gpus) == (14, 1800, 2, 8, 4)
    assert (first.cpu_s, first.largest_rank_bytes, first.memory_bytes) == (3.708, 329000 * 1024, 8 * 2**30)
    assert (second.cpu_s, second.memory_bytes, second.largest_rank_bytes) == (93784, None, None)


def test_resources_as_slurm_writes_them():
    assert parse_tres("cpu=100,gres/gpu:a100=8,mem=1.5T,node=4,bad=x") == {
        "cpu": 100,
        "gres/gpu:a100": 8,
        "mem": 1.5 * 1024**2,
        "node": 4,
    }
    assert (memory_mib("4000"), memory_mib("2G"), memory_mib("UNLIMITED"), memory_mib("")) == (4000, 2048, None, None)
    assert parse_weights("CPU=0.5,Mem=1G") == {"cpu": 0.5, "mem": 1 / 1024}
    assert gpus_of("gpu:a100:4(S:0-1),gpu:v100:2,nvme:1") == {"a100": 4, "v100": 2}
    assert (gpus_of("gpu:4"), gpus_of("gpu"), gpus_of("gpu:a100"), gpus_of("")) == ({"": 4}, {"": 1}, {"a100": 1}, {})


def test_jobs_in_the_queue(slurm):
    found = queued_jobs(slurm("squeue", "12_0@maths@long@main@12_0@\n13@(null)@normal@gpu@13@\n"), "ada")
    assert found == [QueuedJob("maths", "long", "main"), QueuedJob("", "normal", "gpu")]
    assert queued_jobs(slurm("squeue", ""), "ada") == []

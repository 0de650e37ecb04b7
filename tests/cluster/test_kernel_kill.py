"""The kernel kills a job above its memory if Slurm constrains it with cgroups: OUT_OF_MEMORY is its state everywhere."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import running_cluster
from on_slurm import wait_for
from session_cluster import RunningCluster

from toolkit.devcluster import cluster as devcluster
from toolkit.devcluster.layout import ClusterSpec

pytestmark = [pytest.mark.cluster, pytest.mark.evidence]

MEMORY = Path("/sys/fs/cgroup/memory")
# A node has its own /sys, without the control groups of this machine.
MOUNT = "mount -t tmpfs tmpfs /sys/fs/cgroup; mkdir /sys/fs/cgroup/memory; mount -t cgroup -o memory memory /sys/fs/cgroup/memory"
HOG = "--wrap=python3 -c 'b = bytes(bytearray(500 << 20)); input()'"


@pytest.fixture
def constraining() -> Iterator[RunningCluster]:
    if not (MEMORY / "memory.limit_in_bytes").exists():
        pytest.skip("this machine has no memory controller of cgroup v1")
    # slurmd refuses two mechanisms at once.
    options = ("TaskPlugin=task/cgroup", "JobAcctGatherParams=NoShared")
    with running_cluster("-kernel", ClusterSpec(1, 0, "", True, subnet="", options=options)) as layout:
        cluster = RunningCluster(layout)
        assert cluster.exec("node1", ["sh", "-ec", MOUNT]).returncode == 0
        (layout.slurm_conf.parent / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n")
        devcluster.kill_slurmd(layout, "node1")
        devcluster.restore(layout, "node1")
        yield cluster
        subprocess.run(
            ["find", MEMORY / "slurm_node1", "-depth", "-type", "d", "-exec", "rmdir", "{}", ";"], check=False
        )


def test_the_kernel_kills_and_slurm_says_out_of_memory(constraining: RunningCluster) -> None:
    job = constraining.run("sbatch", "--parsable", "--mem=100M", "--output=/dev/null", HOG).strip()
    sacct = ["sacct", "-X", "-n", "-P", "-j", job, "-o", "State,ExitCode"]
    wait_for(lambda: constraining.run(*sacct) == "OUT_OF_MEMORY|0:125\n")
    assert constraining.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T %r") == "OUT_OF_MEMORY OutOfMemory\n"

"""Several clusters under one accounting: how a command names its cluster, and what it prints if the cluster is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# Slurm's commands with an option --clusters.
_WITH_CLUSTER = ("sbatch", "salloc", "srun", "squeue", "scancel", "scontrol", "sinfo", "sacct")
_COMMAND = re.compile(rf"`({'|'.join(_WITH_CLUSTER)}) ")
# What they print for a cluster without an address, in 22.05 to 24.11.
_NO_ADDRESS = re.compile(
    r"can't be reached now, or it is an invalid entry for --cluster|problem talking to the database"
)


def for_cluster(argv: Sequence[str], cluster: str) -> list[str]:
    """A Slurm command with the option for another cluster; any other command unchanged."""
    option = [f"--clusters={cluster}"] if cluster and argv[0] in _WITH_CLUSTER else []
    return [argv[0], *option, *argv[1:]]


def in_words(text: str, cluster: str) -> str:
    """A message in which each Slurm command has the option for another cluster."""
    return _COMMAND.sub(rf"`\1 -M {cluster} ", text) if cluster else text


def named(job_id: str, cluster: str) -> str:
    """A job id in sbatch's form for another cluster, `123;cluster`."""
    return f"{job_id};{cluster}" if job_id and cluster else job_id


def has_no_address(output: str) -> bool:
    """True if a command failed because accounting has no address of the cluster."""
    return _NO_ADDRESS.search(output) is not None


def cluster_of_allocation(environ: Mapping[str, str]) -> str:
    """The cluster of this process's allocation, if Slurm's commands here use another one by default.

    This is the case in the shell of a `salloc -M`, which runs on the login node; on a node of the allocation they use its own.
    """
    if "SLURM_JOB_ID" not in environ or "SLURMD_NODENAME" in environ:
        return ""
    return environ.get("SLURM_WORKING_CLUSTER", "").partition(":")[0] or environ.get("SLURM_CLUSTERS", "")

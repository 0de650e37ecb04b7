"""Several clusters under one accounting: how a command is told which one it is for, and what is said of one that is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# The commands of Slurm's that take --clusters.
_TOLD = ("sbatch", "salloc", "srun", "squeue", "scancel", "scontrol", "sinfo", "sacct")
_COMMAND = re.compile(rf"`({'|'.join(_TOLD)}) ")
# What they say of a cluster whose address they were not given, in 22.05 to 24.11.
_NO_ADDRESS = re.compile(
    r"can't be reached now, or it is an invalid entry for --cluster|problem talking to the database"
)


def for_cluster(argv: Sequence[str], cluster: str) -> list[str]:
    """A command of Slurm's as it is given for another cluster; any other command as it is."""
    told = [f"--clusters={cluster}"] if cluster and argv[0] in _TOLD else []
    return [argv[0], *told, *argv[1:]]


def in_words(text: str, cluster: str) -> str:
    """A message for users, with its Slurm commands rewritten for another cluster."""
    return _COMMAND.sub(rf"`\1 -M {cluster} ", text) if cluster else text


def named(job_id: str, cluster: str) -> str:
    """A job id as sbatch writes that of another cluster, `123;cluster`."""
    return f"{job_id};{cluster}" if job_id and cluster else job_id


def has_no_address(said: str) -> bool:
    """Whether a command failed since accounting gave it no address of the cluster."""
    return _NO_ADDRESS.search(said) is not None


def cluster_of_allocation(environ: Mapping[str, str]) -> str:
    """The cluster of the allocation that this process is in, where Slurm's commands here ask another one.

    That is so in the shell of a `salloc -M`, which is on the login node; on a node of the allocation they ask its own.
    """
    if "SLURM_JOB_ID" not in environ or "SLURMD_NODENAME" in environ:
        return ""
    return environ.get("SLURM_WORKING_CLUSTER", "").partition(":")[0] or environ.get("SLURM_CLUSTERS", "")

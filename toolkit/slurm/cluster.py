"""Query Slurm for the facts about a cluster: name, partitions, nodes, MPI plugins, and the accounts of a user."""

import grp
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.slurm.associations import associations_of, default_account
from toolkit.slurm.commands import Slurm
from toolkit.slurm.limits import PartitionLimits, blocks_of, cluster_settings, shown_partitions
from toolkit.slurm.records import NOTHING, Block, whole_number
from toolkit.slurm.sbatch_options import gpus_of

__all__ = ["ClusterFacts", "Node", "closed_by", "cluster_facts", "mpi_plugins_in"]

_PLUGIN = re.compile(r"^(?:srun: )?\s*([a-z]\w*)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Node:
    """One node: CPUs and memory (in MiB) that jobs can use, GPUs by type ("" if Slurm does not name the type)."""

    name: str
    cpus: int
    memory_mb: int
    gpus: dict[str, int]
    features: tuple[str, ...]
    partitions: tuple[str, ...]

    @property
    def gpu_count(self) -> int:
        return sum(self.gpus.values())


@dataclass(frozen=True)
class ClusterFacts:
    """The facts about a cluster. `settings` contains slurm.conf as `scontrol show config` prints it."""

    name: str
    version: str
    settings: dict[str, str]
    partitions: Mapping[str, PartitionLimits]
    mpi_plugins: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    default_account: str = ""
    nodes: tuple[Node, ...] = field(default=(), repr=False)

    def nodes_of(self, partition: str) -> list[Node]:
        """Return the nodes of one partition."""
        return [node for node in self.nodes if partition in node.partitions]

    @property
    def gpu_types(self) -> list[str]:
        return sorted({kind for node in self.nodes for kind in node.gpus if kind})


def cluster_facts(slurm: Slurm, user: str = "") -> ClusterFacts:
    """Query Slurm for all facts, including the accounts of `user` if the cluster uses slurmdbd."""
    settings = cluster_settings(slurm)
    nodes = tuple(map(node_of, blocks_of(slurm.call(["scontrol", "--oneliner", "show", "node"]), "NodeName")))
    accounts: tuple[str, ...] = ()
    default = ""
    if user and settings.get("AccountingStorageType", "").endswith("slurmdbd"):
        accounts, default = _accounts(slurm, user, settings["ClusterName"])
    return ClusterFacts(
        name=settings["ClusterName"], version=settings.get("SLURM_VERSION", ""), settings=settings,
        partitions=shown_partitions(slurm), mpi_plugins=_mpi_plugins(slurm), accounts=accounts, default_account=default, nodes=nodes,
    )  # fmt: skip


def node_of(block: Block) -> Node:
    """Return a node, without the CPUs and memory that Slurm reserves for the system."""
    return Node(
        name=block.get("NodeName") or "",
        cpus=whole_number(block.get("CPUEfctv", "CPUTot")) or 0,
        memory_mb=(whole_number(block.get("RealMemory")) or 0) - (whole_number(block.get("MemSpecLimit")) or 0),
        gpus=gpus_of(block.get("Gres") or ""),
        features=_words(block.get("AvailableFeatures", "ActiveFeatures")),
        partitions=_words(block.get("Partitions")),
    )


def closed_by(partition: PartitionLimits) -> str:
    """Return the setting that denies this user a partition (RootOnly or AllowGroups); "" if none does."""
    if partition.root_only:
        return "RootOnly=YES"
    groups = partition.allow_groups
    return "" if not groups or _own_groups() & set(groups) else f"AllowGroups={','.join(groups)}"


def _own_groups() -> set[str]:
    names = set()
    for number in {os.getegid(), *os.getgroups()}:
        with suppress(KeyError):  # raised for a group id without a name
            names.add(grp.getgrgid(number).gr_name)
    return names


def _mpi_plugins(slurm: Slurm) -> tuple[str, ...]:
    """Return the plugins that srun --mpi accepts; () if srun fails."""
    try:
        # Versions before 23.11 print the list on stderr.
        output = slurm.call(["sh", "-c", "exec srun --mpi=list 2>&1"])
    except SchedulerRefusedError:
        return ()
    return mpi_plugins_in(output)


def mpi_plugins_in(output: str) -> tuple[str, ...]:
    """Return the plugins in the output of `srun --mpi=list`, which has one per line."""
    return tuple(dict.fromkeys(_PLUGIN.findall(output)))


def _accounts(slurm: Slurm, user: str, cluster: str) -> tuple[tuple[str, ...], str]:
    """Return (accounts of a user, default account); both are empty if sacctmgr fails."""
    try:
        accounts = [one.account for one in associations_of(slurm, user, cluster)]
        return tuple(dict.fromkeys(accounts)), default_account(slurm, user, cluster)
    except (NotFoundError, SchedulerRefusedError):
        return (), ""


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word for word in (text or "").split(",") if word not in NOTHING)

"""Query Slurm for the limits and resources of a cluster: configuration, partitions, kinds of nodes, reservations."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from toolkit.errors import CheckFailedError, SchedulerRefusedError
from toolkit.slurm.commands import Slurm, UnknownClusterError
from toolkit.slurm.records import NOTHING, Block, UnreadableError, new_mark, read_records, show_fields, whole_number
from toolkit.slurm.sbatch_options import gpus_of, memory_mib, parse_weights
from toolkit.slurm.times import printed_limit_s

__all__ = [
    "NodeShape", "PartitionLimits", "PartitionRow", "Reservation", "UnusableNode", "cluster_settings",
    "every_partition", "node_shapes", "partition_rows", "reservations", "unusable_nodes",
]  # fmt: skip

_SETTING = re.compile(r"^(\w+)\s*=[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_UNUSABLE = re.compile(r"(down|drain|fail|maint|unknown|inval)", re.IGNORECASE)


@dataclass(frozen=True)
class PartitionLimits:
    """One partition, as `scontrol show partition` prints it; None and () mean that there is no limit."""

    name: str
    state: str
    is_default: bool
    total_nodes: int
    min_nodes: int
    max_nodes: int | None
    max_time_s: int | None
    default_time_s: int | None
    max_cpus_per_node: int | None
    max_memory_per_node_mib: float | None
    default_memory_per_cpu_mib: float | None
    default_memory_per_node_mib: float | None
    gives_memory_by_gpu: bool  # DefMemPerGPU is set
    gives_whole_nodes: bool
    allow_accounts: tuple[str, ...]
    deny_accounts: tuple[str, ...]
    allow_qos: tuple[str, ...]
    deny_qos: tuple[str, ...]
    allow_groups: tuple[str, ...]
    qos: str
    billing_weights: Mapping[str, float]
    nodes: str = ""  # a hostlist
    requires_reservation: bool = False
    root_only: bool = False


@dataclass(frozen=True)
class NodeShape:
    """A set of equal nodes in a partition. `gpus` contains counts by type, "" if Slurm does not name the type."""

    nodes: int
    names: str  # a hostlist
    cpus: int
    memory_mib: int
    gpus: Mapping[str, int]
    features: frozenset[str]
    is_usable: bool
    is_reserved: bool = False  # an active reservation contains these nodes


@dataclass(frozen=True)
class Reservation:
    """A reservation, with flags such as FLEX, and the users, accounts and groups that may use it; () means unrestricted."""

    name: str
    end: datetime | None  # local time of the cluster
    nodes: int
    flags: tuple[str, ...]
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


def cluster_settings(slurm: Slurm) -> dict[str, str]:
    """Return the configuration of slurmctld by key; "" for a key without a value. Errors as in `Slurm.call`."""
    text = slurm.call(["scontrol", "show", "config"])
    settings = {name: "" if value in NOTHING else value for name, value in _SETTING.findall(text)}
    if "ClusterName" not in settings:
        raise UnreadableError("scontrol", text)
    return settings


def every_partition(slurm: Slurm) -> dict[str, PartitionLimits]:
    """Return the limits of all partitions by name, including hidden ones; errors as in `Slurm.call`."""
    return _partitions(slurm, "--all")


def shown_partitions(slurm: Slurm) -> dict[str, PartitionLimits]:
    """Return the limits of the partitions that this user can see, by name; errors as in `Slurm.call`."""
    return _partitions(slurm)


def _partitions(slurm: Slurm, *options: str) -> dict[str, PartitionLimits]:
    text = slurm.call(["scontrol", *options, "--oneliner", "show", "partition"])
    return {one.name: one for one in map(limits_of, blocks_of(text, "PartitionName"))}


def node_shapes(slurm: Slurm, partitions: str) -> list[NodeShape]:
    """Return the kinds of nodes in some partitions (names separated by commas), as sinfo groups them."""
    rows = ask_sinfo(slurm, "--exact", f"--partition={partitions}", columns="%N %D %c %m %G %f %T")
    shapes = {
        names: NodeShape(
            int(count), names, int(cpus), int(memory), gpus_of(gres), frozenset(filter(None, features.split(","))),
            not _UNUSABLE.match(state) and not state.endswith("*"), is_reserved=state.lower().startswith("reserved"),
        )
        for names, count, cpus, memory, gres, features, state in rows
        if count.isdigit() and cpus.isdigit() and memory.isdigit()
    }  # fmt: skip
    return list(shapes.values())


def reservations(slurm: Slurm, name: str) -> list[Reservation]:
    """Return the reservation `name` in a list; [] if it does not exist. Errors as in `Slurm.call`."""
    try:
        text = slurm.call(["scontrol", "--oneliner", "show", "reservation", name])
    except UnknownClusterError:  # its message also says "not found"
        raise
    except SchedulerRefusedError as error:
        if "not found" in error.message:
            return []
        raise
    return [
        Reservation(
            block.get("ReservationName") or "", _moment(block.get("EndTime") or ""), whole_number(block.get("NodeCnt")) or 0,
            flags=_names(block, "Flags"), users=_names(block, "Users"), accounts=_names(block, "Accounts"),
            groups=_names(block, "Groups"),
        )
        for block in blocks_of(text, "ReservationName")
    ]  # fmt: skip


def blocks_of(text: str, first: str) -> list[Block]:
    """Parse the output of `scontrol --oneliner show`, one block per line; UnreadableError if it is damaged."""
    try:
        return show_fields(text, first)[0]
    except CheckFailedError as error:
        raise UnreadableError("scontrol", text) from error


def limits_of(block: Block) -> PartitionLimits:
    """Return the limits of a partition from its block in the output of `scontrol show partition`."""
    return PartitionLimits(
        name=block.get("PartitionName") or "", state=block.get("State") or "",
        is_default=block.get("Default") == "YES", total_nodes=whole_number(block.get("TotalNodes")) or 0,
        min_nodes=whole_number(block.get("MinNodes")) or 0, max_nodes=whole_number(block.get("MaxNodes")),
        max_time_s=printed_limit_s(block.get("MaxTime") or ""),
        default_time_s=printed_limit_s(block.get("DefaultTime") or ""),
        max_cpus_per_node=whole_number(block.get("MaxCPUsPerNode")),
        max_memory_per_node_mib=memory_mib(_text(block, "MaxMemPerNode")),
        default_memory_per_cpu_mib=memory_mib(_text(block, "DefMemPerCPU")),
        default_memory_per_node_mib=memory_mib(_text(block, "DefMemPerNode")),
        gives_memory_by_gpu="DefMemPerGPU" in _text(block, "JobDefaults"),
        gives_whole_nodes=_text(block, "OverSubscribe").startswith("EXCLUSIVE"),
        allow_accounts=_names(block, "AllowAccounts"), deny_accounts=_names(block, "DenyAccounts"),
        allow_qos=_names(block, "AllowQos"), deny_qos=_names(block, "DenyQos"),
        allow_groups=_names(block, "AllowGroups"), qos="" if _text(block, "QoS") == "N/A" else _text(block, "QoS"),
        billing_weights=parse_weights(_text(block, "TRESBillingWeights")), nodes=_text(block, "Nodes"),
        requires_reservation=_text(block, "ReqResv") == "YES", root_only=block.get("RootOnly") == "YES",
    )  # fmt: skip


def _text(block: Block, key: str) -> str:
    value = block.get(key) or ""
    return "" if value in NOTHING else value


def _names(block: Block, key: str) -> tuple[str, ...]:
    value = _text(block, key)
    return () if value == "ALL" else tuple(filter(None, value.split(",")))


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class PartitionRow:
    """A partition as sinfo prints it; `node_states` contains node counts as allocated/idle/other/total."""

    name: str
    state: str
    time_limit: str
    nodes: str
    node_states: str
    job_size: str


@dataclass(frozen=True)
class UnusableNode:
    """A node that is down or drained, with the administrator's reason."""

    name: str
    state: str
    reason: str
    user: str
    since: str


def partition_rows(slurm: Slurm, names: str) -> list[PartitionRow]:
    """Return limits and states of some partitions (names separated by commas); errors as in `Slurm.call`."""
    return [PartitionRow(*cells) for cells in ask_sinfo(slurm, f"--partition={names}", columns="%R %a %l %D %F %s")]


def unusable_nodes(slurm: Slurm, *, partition: str = "", nodes: str = "") -> list[UnusableNode]:
    """Return the nodes of a partition or hostlist that are down, drained or draining, without duplicates."""
    which = f"--nodes={nodes}" if nodes else f"--partition={partition}"
    states = "--states=down,drain,fail,maint,no_respond"
    rows = ask_sinfo(slurm, "--Node", states, which, columns="%N %T %E %u %H")
    return list({cells[0]: UnusableNode(*cells) for cells in rows}.values())


def ask_sinfo(slurm: Slurm, *options: str, columns: str) -> list[list[str]]:
    """Return rows of cells; `columns` contains format characters of sinfo, the first of which is the key of a row."""
    mark, names = new_mark(), columns.split()
    form = "".join(name + mark for name in [*names, names[0]])
    text = slurm.call(["sinfo", "--noheader", *options, f"--format={form}"])
    return [record[:-1] for record in read_records("sinfo", text, mark, len(names) + 1)]

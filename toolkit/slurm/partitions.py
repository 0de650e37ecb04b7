"""Partitions and unusable nodes, according to sinfo."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.slurm.commands import Slurm
from toolkit.slurm.records import new_mark, read_records


@dataclass(frozen=True)
class PartitionRow:
    """A partition as sinfo prints it; `node_states` counts its nodes: allocated, idle, other, all."""

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
    """Limits and states of some partitions, whose names are separated by commas.

    Raises:
        NotFoundError, SchedulerRefusedError: Slurm does not respond.
    """
    return [PartitionRow(*cells) for cells in ask_sinfo(slurm, f"--partition={names}", columns="%R %a %l %D %F %s")]


def unusable_nodes(slurm: Slurm, *, partition: str = "", nodes: str = "") -> list[UnusableNode]:
    """Nodes of a partition, or of a hostlist, that are down, drained or draining, each once.

    Raises:
        NotFoundError, SchedulerRefusedError: Slurm does not respond.
    """
    which = f"--nodes={nodes}" if nodes else f"--partition={partition}"
    states = "--states=down,drain,fail,maint,no_respond"
    rows = ask_sinfo(slurm, "--Node", states, which, columns="%N %T %E %u %H")
    return list({cells[0]: UnusableNode(*cells) for cells in rows}.values())


def ask_sinfo(slurm: Slurm, *options: str, columns: str) -> list[list[str]]:
    """Rows of cells, one for each of the `columns`, which are format characters of sinfo; the first one is the key.

    Raises:
        NotFoundError, SchedulerRefusedError: Slurm does not respond.
    """
    mark, names = new_mark(), columns.split()
    form = "".join(name + mark for name in [*names, names[0]])
    text = slurm.call(["sinfo", "--noheader", *options, f"--format={form}"])
    return [record[:-1] for record in read_records("sinfo", text, mark, len(names) + 1)]

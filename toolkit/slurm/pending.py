"""What Slurm knows of a waiting job: its ask, its partition's limits, and the nodes that cannot serve it."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import SchedulerRefusedError
from toolkit.slurm.commands import Slurm

_SEPARATOR = "\x1f"
_NOTHING = ("", "N/A", "None", "(null)", "Unknown", "NONE")


@dataclass(frozen=True)
class WaitingJob:
    """One row of squeue in Slurm's own words; "" for what it does not say. `start` is the expected start, `squeue --start`."""

    job_id: str
    state: str
    reason: str
    partition: str
    nodes: str
    time_limit: str
    start: str
    dependency: str
    user: str
    required_nodes: str


@dataclass(frozen=True)
class Partition:
    """A partition's limits as sinfo prints them; `node_states` counts its nodes: allocated, idle, other, all."""

    name: str
    state: str
    time_limit: str
    nodes: str
    node_states: str
    job_size: str


@dataclass(frozen=True)
class UnusableNode:
    """A node that is down or drained, with the reason that somebody gave."""

    name: str
    state: str
    reason: str
    user: str
    since: str


def waiting_jobs(slurm: Slurm, job_id: str) -> list[WaitingJob]:
    """The rows of a job: one, or for an array one a task that differs; [] when Slurm has forgotten it.

    Raises:
        NotFoundError, SchedulerRefusedError: Slurm does not answer.
    """
    form = _SEPARATOR.join(("%i", "%T", "%r", "%P", "%D", "%l", "%S", "%E", "%u", "%n"))
    try:
        text = slurm.call(["squeue", "--noheader", "--states=all", f"--format={form}", f"--jobs={job_id}"])
    except SchedulerRefusedError as error:
        if "Invalid job id" in error.message:
            return []
        raise
    return [WaitingJob(*row) for row in _rows(text, 10)]


def partition_limits(slurm: Slurm, names: str) -> list[Partition]:
    """The limits of some partitions, whose names stand between commas."""
    form = _SEPARATOR.join(("%R", "%a", "%l", "%D", "%F", "%s"))
    return [Partition(*row) for row in _rows(_sinfo(slurm, f"--partition={names}", form), 6)]


def unusable_nodes(slurm: Slurm, *, partition: str = "", nodes: str = "") -> list[UnusableNode]:
    """Nodes of a partition, or of a hostlist, that are down, drained or draining, each once."""
    form = _SEPARATOR.join(("%N", "%T", "%E", "%u", "%H"))
    which = f"--nodes={nodes}" if nodes else f"--partition={partition}"
    text = _sinfo(slurm, "--Node", "--states=down,drain,fail,maint,no_respond", which, form)
    found = {row[0]: UnusableNode(*row) for row in _rows(text, 5)}
    return list(found.values())


def _sinfo(slurm: Slurm, *words: str) -> str:
    *options, form = words
    return slurm.call(["sinfo", "--noheader", *options, f"--format={form}"])


def _rows(text: str, width: int) -> list[list[str]]:
    rows = ([cell.strip() for cell in line.split(_SEPARATOR)] for line in text.splitlines())
    return [["" if cell in _NOTHING else cell for cell in row] for row in rows if len(row) == width]

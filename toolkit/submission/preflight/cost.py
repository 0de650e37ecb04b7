"""Estimate the cost of a job: node-hours, CPU-hours, GPU-hours and, with the site's weights, billing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import counted
from toolkit.runs.record.job import Request
from toolkit.slurm.times import format_slurm_time

if TYPE_CHECKING:
    from toolkit.slurm.limits import PartitionLimits
    from toolkit.submission.preflight.cluster import Cluster

__all__ = ["Cost", "cost_of", "in_words", "together"]

_SUMMED = ("nodes", "cpus", "gpus", "node_hours", "cpu_hours", "gpu_hours", "billing_hours")


@dataclass(frozen=True)
class Cost:
    """The use of all tasks and repeated jobs together up to their walltime. Hours are None if the walltime is unknown.

    `repeat` is the number of repeated jobs, 1 for any other job. `time_s` is the walltime of the job, or the default of
    its partition. `billing_hours` are TRESBillingWeights times hours, None if the partition has no weights. `goes_on`
    is true if the run may be requeued at its walltime, and then cost this again.
    """

    tasks: int
    repeat: int
    nodes: int
    cpus: int
    gpus: int
    time_s: int | None
    node_hours: float | None
    cpu_hours: float | None
    gpu_hours: float | None
    billing_hours: float | None
    goes_on: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cost_of(job: ResolvedJob, request: Request, cluster: Cluster | None = None) -> Cost:
    """Return the most that a job can use until a requeue; `cluster` has the partition's default time and weights."""
    partition = next(iter(cluster.chosen(request)), None) if cluster is not None else None
    nodes, tasks = request.max_nodes, request.tasks
    tres = request.tres(nodes)
    if cluster is not None and partition is not None and (request.whole_nodes or partition.gives_whole_nodes):
        tres["cpu"] = float(nodes * max((shape.cpus for shape in cluster.shapes or ()), default=request.cpus_per_node))
    time_s = request.time_s if request.has_time else _default_time_s(job, partition)
    repeat = job.job.repeat
    hours = None if time_s is None else tasks * repeat * time_s / 3600
    weights = partition.billing_weights if partition is not None else {}
    most_alone = "MAX_TRES" in cluster.settings.get("PriorityFlags", "") if cluster is not None else False
    return Cost(
        tasks, repeat, nodes, int(tres["cpu"]), int(tres.get("gres/gpu", 0)), time_s,
        node_hours=None if hours is None else hours * nodes,
        cpu_hours=None if hours is None else hours * tres["cpu"],
        gpu_hours=None if hours is None else hours * tres.get("gres/gpu", 0.0),
        billing_hours=None if hours is None or not weights else hours * billing_of(tres, weights, most_alone=most_alone),
        goes_on=job.job.requeue and job.restart.walltimes != 0,
    )  # fmt: skip


def together(costs: Sequence[Cost]) -> Cost:
    """Return the cost of a heterogeneous job, whose components start and end together; unknown sums are None."""
    sums = {name: _sum([getattr(one, name) for one in costs]) for name in _SUMMED}
    times = [one.time_s for one in costs]
    return replace(costs[0], **sums, time_s=None if None in times else max(filter(None, times), default=0))


def _sum(counts: Sequence[float | None]) -> Any:
    return None if None in counts else sum(filter(None, counts))


def _default_time_s(job: ResolvedJob, partition: PartitionLimits | None) -> int | None:
    """Return the walltime of a job without one: the partition's DefaultTime, else its MaxTime."""
    if partition is not None:
        return partition.max_time_s if partition.default_time_s is None else partition.default_time_s
    return job.partition_limits.max_time_s if job.partition_limits is not None else None


def billing_of(tres: Mapping[str, float], weights: Mapping[str, float], *, most_alone: bool) -> float:
    """Return Slurm's billing of some resources (slurm.conf(5), TRESBillingWeights).

    `most_alone` is PriorityFlags=MAX_TRES: only the most expensive resource counts.
    """
    parts = {name.lower(): weights.get(name.lower(), 0.0) * count for name, count in tres.items()}
    return max(parts.values(), default=0.0) if most_alone else sum(parts.values())


def in_words(cost: Cost) -> str:
    """Return one line for the user: `requests at most 8 node-hours, 32 GPU-hours (4 nodes x 2:00:00)`."""
    shape = counted(cost.nodes, "node") + (f" x {counted(cost.tasks, 'task')}" if cost.tasks > 1 else "")
    shape += f" x {cost.repeat} repeated jobs" if cost.repeat > 1 else ""
    if cost.node_hours is None:
        gpus = f", {counted(cost.gpus, 'GPU')}" if cost.gpus else ""
        return f"requests {shape}{gpus} without a time limit"
    parts = [f"{_rounded(cost.node_hours)} node-hours"]
    if cost.gpus:
        parts.append(f"{_rounded(cost.gpu_hours)} GPU-hours")
    else:
        parts.append(f"{_rounded(cost.cpu_hours)} CPU-hours")
    if cost.billing_hours is not None:
        parts.append(f"{_rounded(cost.billing_hours)} billing hours")
    return f"requests at most {', '.join(parts)} ({shape} x {format_slurm_time(cost.time_s)}){_again(cost)}"


def _again(cost: Cost) -> str:
    """Return what a requeue may add to the cost."""
    if not cost.goes_on:
        return ""
    if cost.tasks > 1:
        return "; a task that has not finished by then is requeued and uses its part again"
    return "; if it has not finished by then, it is requeued and uses as much again"


def _rounded(hours: float | None) -> str:
    return f"{hours:.2f}".rstrip("0").rstrip(".") if hours is not None and hours < 10 else f"{hours:.0f}"

"""Choose the partition for a job: score all partitions that can run it, and report why one was chosen.

A partition can run a job if the job resolves for it. Otherwise the errors of the job are the reasons for the rejection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from toolkit.config.checks import beyond_limits
from toolkit.config.document import Flag, Origin
from toolkit.config.refusal import refuse
from toolkit.config.request import JobRequest, resolve, with_rank_flags
from toolkit.config.resolved import ResolvedJob, is_elsewhere
from toolkit.config.site import AUTO, Site
from toolkit.errors import NotFoundError, SchedulerRefusedError, ToolkitError, counted
from toolkit.slurm.commands import slurm_of_site
from toolkit.slurm.limits import partition_rows
from toolkit.slurm.times import format_slurm_time

__all__ = ["Candidate", "candidates", "resolve_in_allocation", "resolve_on"]

SINFO_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Candidate:
    """A partition for a job. If it cannot run the job, `refused` is the reason, and the numbers are meaningless.

    `idle_gpus` and `idle_cpus` are the GPUs and CPUs that the job would leave idle on its nodes. `idle_nodes` is the
    number from sinfo, None if sinfo did not respond.
    """

    name: str
    refused: str = ""
    fix: str = ""
    nodes: int = 0
    idle_gpus: int = 0
    idle_cpus: int = 0
    idle_nodes: int | None = None
    limit_s: int | None = None
    time_given: bool = True

    @property
    def score(self) -> tuple[float, ...]:
        """The score (smaller is better): least waste, then most idle nodes, then the shortest time limit.

        A job without a time gets the time limit of the partition, so for it the longest limit is best.
        """
        limit = float("inf") if self.limit_s is None else self.limit_s
        return (
            self.idle_gpus,
            self.idle_cpus,
            -min(self.idle_nodes or 0, self.nodes),
            limit if self.time_given else -limit,
        )

    def why_not_best(self, best: Candidate) -> str:
        """Return why this partition was not chosen: the first part of its score that is worse than that of `best`."""
        if self.idle_gpus != best.idle_gpus:
            return f"{counted(self.idle_gpus - best.idle_gpus, 'GPU')} would be idle beyond those on {best.name}"
        if self.idle_cpus != best.idle_cpus:
            return f"{counted(self.idle_cpus - best.idle_cpus, 'CPU')} would be idle beyond those on {best.name}"
        idle, idle_there = (min(one.idle_nodes or 0, self.nodes) for one in (self, best))
        if idle != idle_there:
            return f"{idle} of {counted(self.nodes, 'node')} would be free now, compared to {idle_there} on {best.name}"
        if self.limit_s != best.limit_s:
            return f"its time limit is {'longer' if self.time_given else 'shorter'} than the limit of {best.name}"
        return f"it has the same score as {best.name}, which is first in the site file"

    def in_words(self) -> str:
        """Return the parts of the score as text."""
        parts = [f"{self.idle_gpus} GPUs and {self.idle_cpus} CPUs beyond the request"]
        if self.idle_nodes is not None:
            parts.append(f"{counted(self.idle_nodes, 'node')} idle")
        parts.append(f"limit {format_slurm_time(self.limit_s)}" if self.limit_s is not None else "no known limit")
        return ", ".join(parts)


def needs_choice(raw: ResolvedJob, site: Site) -> bool:
    """Return whether toolkit chooses the partition: on request, or if neither the job nor the site names one."""
    if site.scheduler.kind == "local":
        return False
    named = raw.job.partition
    if is_elsewhere(raw.job.cluster, site):
        if named == AUTO:
            raise _none_known(raw, site)
        return False
    return named == AUTO or (not named and not site.default_partition and bool(site.partitions))


def _none_known(raw: ResolvedJob, site: Site) -> ToolkitError:
    cluster = raw.job.cluster
    message = f"site {site.name} does not describe cluster {cluster}, so toolkit cannot choose a partition"
    return refuse(raw, "job.partition", message, f"choose one with -p; `sinfo -M {cluster} -s` lists them")


def candidates(request: JobRequest, site: Site) -> tuple[list[Candidate], str]:
    """Return (the partitions of the site for a job, best first, and why the numbers of idle nodes are unknown, or "").

    Raises:
        ToolkitError: the site file lists no partitions, or the job is for a cluster that it does not describe.
    """
    request = with_rank_flags(request)
    if is_elsewhere((raw := resolve(request, None)).job.cluster, site):
        raise _none_known(raw, site)
    if not site.partitions:
        raise ToolkitError(
            f"site {site.name} does not list partitions to choose from",
            where="job.partition",
            fix="choose one with -p, or add [partitions] to the site file",
        )
    found = [_judge(request, site, name) for name in site.partitions]
    states, silence = _ask_sinfo(site)
    found = [_with_nodes(one, states) for one in found]
    return sorted(found, key=lambda one: (bool(one.refused), one.score)), silence


def resolve_on(request: JobRequest, site: Site, tell: Callable[[str], object], *, limits: bool = True) -> ResolvedJob:
    """Return the job resolved for a site. If toolkit chooses the partition, it passes the choice and reason to `tell`.

    With `limits` False, the caller checks the limits of a partition that the user named by a query to the cluster.

    Raises:
        ToolkitError: no partition can run the job; the message contains the reason for each.
    """
    request = with_rank_flags(request)
    if not needs_choice(resolve(request, None), site):
        return resolve(request, site, limits=limits)
    ranked, silence = candidates(request, site)
    best = ranked[0]
    if best.refused:
        if len({one.refused for one in ranked}) == 1:
            _in_partition(request, site, best.name)  # raises the error that all have in common, with its place
        raise no_partition(site, ranked)
    others = [one for one in ranked[1:] if not one.refused]
    refused = len(ranked) - 1 - len(others)
    against = f"; next is {others[0].name}: {others[0].in_words()}" if others else ""
    tell(
        f"chose partition {best.name} of {site.name}: {best.in_words()}{against}"
        + (f"; {refused} cannot run the job" if refused else "")
        + (f"; {silence}" if silence else "")
    )
    return _in_partition(request, site, best.name)


def resolve_in_allocation(request: JobRequest, site: Site) -> ResolvedJob:
    """Return the job resolved for nodes that are already allocated, ignoring a request to choose a partition."""
    request = with_rank_flags(request)
    asks = resolve(request, None).job.partition == AUTO
    return resolve(request.with_flags({"job.partition": Flag("", "-p")}) if asks else request, site)


def no_partition(site: Site, ranked: Iterable[Candidate]) -> ToolkitError:
    """Return the error for a job that no partition can run, with a line per partition."""
    errors = [ToolkitError(f"{one.name}: {one.refused}", fix=one.fix) for one in ranked]
    first = ToolkitError(
        f"no partition of {site.name} can run the job", where="job.partition", fix="see the fix for each partition"
    )
    first.others = tuple(errors)
    return first


def _in_partition(request: JobRequest, site: Site, name: str) -> ResolvedJob:
    resolved = resolve(request.with_flags({"job.partition": Flag(name, "-p")}), site)
    origin = Origin("derived", f"the best of {len(site.partitions)} partitions")
    return resolved.model_copy(update={"origins": {**resolved.origins, "job.partition": origin}})


def _judge(request: JobRequest, site: Site, name: str) -> Candidate:
    try:
        resolved = _in_partition(request, site, name)
    except ToolkitError as error:
        return _refused(name, [error, *error.others])
    if beyond := beyond_limits(resolved, site):
        return _refused(name, beyond)
    job, limits = resolved.job, site.partitions[name]
    # GPUs that the job has only by default count as idle, since the user did not request them.
    asked = job.gpus_per_node if resolved.origin("job.gpus_per_node").layer not in ("site", "derived") else 0
    cpus = job.ranks_per_node * job.cpus_per_rank
    return Candidate(
        name, nodes=job.min_nodes, idle_gpus=job.min_nodes * max(0, limits.gpus_per_node - asked),
        idle_cpus=job.min_nodes * max(0, limits.cpus_per_node - cpus), limit_s=limits.max_time_s,
        time_given=bool(job.time),
    )  # fmt: skip


def _refused(name: str, errors: Sequence[ToolkitError]) -> Candidate:
    """Return a partition that cannot run the job, with all reasons."""
    return Candidate(
        name, refused="; ".join(one.message for one in errors), fix="; ".join(one.fix for one in errors if one.fix)
    )


def _ask_sinfo(site: Site) -> tuple[dict[str, tuple[str, int, int]], str]:
    """Return ((state, idle nodes, total nodes) of each partition, ""), or ({}, why they are unknown).

    If sinfo does not list all partitions, it is for another cluster, whose partitions may share some names.
    """
    slurm = replace(slurm_of_site(site.scheduler), timeout_s=SINFO_TIMEOUT_S)
    try:
        rows = partition_rows(slurm, ",".join(site.partitions))
    except (NotFoundError, SchedulerRefusedError) as error:
        return {}, f"idle nodes are unknown: {error.message}"
    found = {row.name: (row.state, *_counts(row.node_states)) for row in rows}
    if unknown := [name for name in site.partitions if name not in found]:
        return {}, f"idle nodes are unknown: sinfo here does not list partition {unknown[0]}"
    return found, ""


def _counts(node_states: str) -> tuple[int, int]:
    """Return (idle, total) from the `allocated/idle/other/total` of sinfo, which may contain numbers such as 1.2K."""
    _, idle, _, total = (node_states.split("/") + ["0"] * 4)[:4]
    return _count(idle), _count(total)


def _count(text: str) -> int:
    return int(float(text[:-1]) * 1000) if text.endswith("K") else int(text or 0)


def _with_nodes(one: Candidate, states: dict[str, tuple[str, int, int]]) -> Candidate:
    if one.name not in states or one.refused:
        return one
    state, idle, total = states[one.name]
    if state != "up":
        return replace(
            one, refused=f"sinfo reports its state as {state}", fix="wait until it is up, or choose another with -p"
        )
    if one.nodes > total:
        problem = f"the job needs {counted(one.nodes, 'node')}, but sinfo reports {total}"
        return replace(one, refused=problem, fix=f"request at most {counted(total, 'node')}")
    return replace(one, idle_nodes=idle)

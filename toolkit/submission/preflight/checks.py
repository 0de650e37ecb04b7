"""Every check of a job before its submission, and what they find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.config.checks import beyond_limits
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.record.job import Request, request_of, slurm_of, uses_slurm
from toolkit.slurm.commands import UnknownClusterError
from toolkit.submission.preflight.accounts import against_accounts
from toolkit.submission.preflight.cluster import Cluster, ask_cluster
from toolkit.submission.preflight.cost import Cost, cost_of, together
from toolkit.submission.preflight.files import check_files
from toolkit.submission.preflight.finding import About, Finding, Severity
from toolkit.submission.preflight.nodes import against_nodes
from toolkit.submission.preflight.partitions import against_partitions, against_reservation
from toolkit.submission.preflight.shape import against_array_limits, check_dependency, check_shape, check_sums
from toolkit.submission.preflight.storage import check_room, check_shared

__all__ = ["Preflight", "look"]


@dataclass(frozen=True)
class Preflight:
    """What was found, refusals first. `silent` lists the facts that the cluster did not provide, and why.

    `is_final` is true where there is no cluster to submit to, so that nothing could pass over the refusals.
    """

    findings: tuple[Finding, ...]
    silent: tuple[str, ...]
    cost: Cost | None
    is_final: bool = False

    @property
    def refusals(self) -> list[Finding]:
        return [one for one in self.findings if one.severity is Severity.REFUSAL]

    @property
    def warnings(self) -> list[Finding]:
        return [one for one in self.findings if one.severity is Severity.WARNING]

    def as_json(self) -> dict[str, Any]:
        """The documented JSON of `preflight --json`."""
        return {
            "good": not self.refusals,
            "findings": [one.as_json() for one in self.findings],
            "not_answered": list(self.silent),
            "cost": None if self.cost is None else self.cost.as_json(),
        }


def look(
    job: ResolvedJob,
    runs: Path | None,
    *,
    site: Site | None = None,
    extra_sbatch_options: Sequence[str] = (),
    run: RunDirectory | None = None,
) -> Preflight:
    """Check a job and, if it goes to Slurm, the cluster.

    Args:
        runs: the folder of run directories; None for a session, which is nodes alone: nothing of the job runs there.
        site: also checks its limits; None if the job was checked against them already.
        extra_sbatch_options: options of sbatch for this submission alone.
        run: the run that the job continues.
    """
    requests = [(one, request_of(one, extra_sbatch_options)) for one in job.components]
    found = [finding for one, request in requests for finding in check_shape(one, request)]
    found += check_dependency(job, extra_sbatch_options)
    if runs is not None:
        found += [*check_files(job, extra_sbatch_options), *check_room(job, runs, run)]
    if not uses_slurm(job):
        return Preflight(_ordered(found), (), None)
    costs: list[Cost] = []
    silent: list[str] = []
    past_time = False
    for one, request in requests:
        try:
            cluster, unanswered = _ask(one, request)
        except UnknownClusterError as error:
            found.append(About(job, "cluster").refuse("job.cluster", error.message, error.fix))
            return Preflight(_ordered(found), (), None, is_final=True)
        silent += unanswered
        costs.append(cost_of(one, request, cluster))
        if runs is not None:
            found += check_shared(one, runs, cluster)
        if cluster is not None:
            found += _against_cluster(one, request, cluster)
            found += check_sums(job, [asked for _, asked in requests], cluster)
            past_time |= "PartitionTimeLimit" in cluster.limits_of(request).flags
    if site is not None:
        found += _of_site_file(job, site, found, past_time=past_time)
    cost = together(costs)
    if runs is None:
        cost = replace(cost, goes_on=False)  # a session is never requeued
    return Preflight(_ordered(found), tuple(dict.fromkeys(silent)), cost)


def _ask(job: ResolvedJob, request: Request) -> tuple[Cluster | None, Sequence[str]]:
    try:
        cluster = ask_cluster(slurm_of(job), request)
    except UnknownClusterError:
        raise
    except (NotFoundError, SchedulerRefusedError) as error:
        return None, (f"the cluster: {error.message}",)
    return cluster, cluster.silent


def _against_cluster(job: ResolvedJob, request: Request, cluster: Cluster) -> Iterator[Finding]:
    of_partitions = against_partitions(job, request, cluster)
    yield from of_partitions
    known = {one.where for one in of_partitions}
    # For one value, only the nearer limit is reported.
    yield from (one for one in against_nodes(job, request, cluster) if one.where not in known)
    yield from against_reservation(job, request, cluster)
    yield from against_array_limits(job, cluster.settings)
    yield from against_accounts(job, request, cluster)


def _of_site_file(job: ResolvedJob, site: Site, found: Sequence[Finding], *, past_time: bool) -> list[Finding]:
    """Return refusals by the site file alone; if the cluster refuses the same value, that refusal is enough.

    `past_time` is true where the job's QOS goes past a partition's time limit.
    """
    told = {one.where for one in found if one.severity is Severity.REFUSAL}
    if past_time:
        told.add(job.origin("job.time").place("job.time"))
    return [
        Finding("site_limits", Severity.REFUSAL, error.where, error.message, error.fix)
        for error in beyond_limits(job, site)
        if error.where not in told
    ]


def _ordered(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return findings by severity; one that several components share is reported once."""
    order = list(Severity)
    return tuple(sorted(dict.fromkeys(found), key=lambda one: order.index(one.severity)))

"""Compare a request with the limits of its partitions; one that accepts it is enough."""

import getpass
import grp
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

from toolkit.config.resolved import ResolvedJob
from toolkit.config.table import nearest
from toolkit.errors import counted
from toolkit.metrics.verdicts import Severity
from toolkit.runs.record.job import Request
from toolkit.slurm.limits import PartitionLimits, Reservation
from toolkit.slurm.times import format_slurm_time
from toolkit.submission.preflight.cluster import Cluster
from toolkit.submission.preflight.finding import About, Finding

__all__ = ["against_partitions", "against_reservation", "cpu_fix", "in_gib"]


def against_partitions(job: ResolvedJob, request: Request, cluster: Cluster) -> list[Finding]:
    """Return the findings for the first partition that accepts the job, or else for the first one that it names."""
    about = About(job, "partition")
    if unknown := [name for name in request.partitions if name not in cluster.partitions]:
        close = nearest(unknown[0], cluster.partitions) or [one.name for one in cluster.partitions.values()]
        listed = " or ".join(f'"{name}"' for name in close[:6])
        refusal = about.refuse(
            "job.partition", f"this cluster has no partition {unknown[0]!r}", f"partition = {listed}"
        )
        return [refusal, *_whichever_is_meant(job, request, cluster)]
    chosen = cluster.chosen(request)
    if not chosen:
        names = ", ".join(list(cluster.partitions)[:6])
        refusal = about.refuse(
            "job.partition", "the cluster has no default partition", f"choose one of {names} with -p"
        )
        return [refusal, *_whichever_is_meant(job, request, cluster)]
    beyond = cluster.limits_of(request).flags
    charged = cluster.with_defaults(request)
    found = [list(_against(job, charged, one, beyond)) for one in chosen]
    refused = [any(one.severity is Severity.CRITICAL for one in findings) for findings in found]
    return found[0] if all(refused) else found[refused.index(False)]


def _whichever_is_meant(job: ResolvedJob, request: Request, cluster: Cluster) -> Iterator[Finding]:
    """Return the refusals that apply in every partition of the cluster, whichever one the user intended."""
    beyond = cluster.limits_of(request).flags
    here = cluster.candidates(request)
    first, *others = [
        [one for one in _against(job, request, partition, beyond) if one.severity is Severity.CRITICAL]
        for partition in here
    ]
    for finding in first:
        is_everywhere = all(finding.where in [one.where for one in found] for found in others)
        if is_everywhere and finding.where != job.origin("job.partition").place("job.partition"):
            what = f"{finding.what}, and no other partition accepts it" if others else finding.what
            yield replace(finding, what=what)


def against_reservation(job: ResolvedJob, request: Request, cluster: Cluster) -> Iterator[Finding]:
    """Return findings on the reservation of a job; Slurm kills the job when the reservation ends."""
    if cluster.reservations is None:
        return
    about = About(job, "reservation")
    if not cluster.reservations:
        what = f"there is no reservation {request.reservation}"
        yield about.refuse("job.sbatch", what, "`scontrol show reservation` lists them")
        return
    reservation = cluster.reservations[0]
    if reservation.end is not None and request.time_s is not None:
        left_s = int((reservation.end - datetime.now()).total_seconds())
        if left_s <= 0:
            yield about.refuse(
                "job.sbatch", f"reservation {reservation.name} ended at {reservation.end}", "omit --reservation"
            )
        elif request.time_s > left_s and "FLEX" not in reservation.flags:
            # At that time, Slurm kills the job without the warning signal, which it sends only before the walltime.
            yield about.warn(
                "job.time",
                f"walltime {format_slurm_time(request.time_s)}, but reservation {reservation.name} ends in {format_slurm_time(left_s)}",
                f'time = "{_in_minutes(left_s)}", or omit --reservation',
            )
    yield from _may_use(about, cluster.with_defaults(request), reservation)
    if reservation.nodes and request.min_nodes > reservation.nodes and "FLEX" not in reservation.flags:
        yield about.refuse(
            "job.nodes",
            f"{counted(request.min_nodes, 'node')}, but reservation {reservation.name} has {reservation.nodes}",
            f"nodes = {reservation.nodes}",
        )


def _may_use(about: About, request: Request, reservation: Reservation) -> Iterator[Finding]:
    """Return findings on users and accounts of a reservation; only Slurm checks excluded names (`-NAME`) and groups."""
    named = (*reservation.users, *reservation.accounts)
    if not named or reservation.groups or any(name.startswith("-") for name in named):
        return
    if getpass.getuser() in reservation.users or request.account in reservation.accounts:
        return
    what = f"reservation {reservation.name} is only for {', '.join(named[:6])}"
    if not reservation.accounts:
        yield about.refuse("job.sbatch", f"{what}, but you are {getpass.getuser()}", "omit --reservation")
    elif request.account:  # the account may be a child of an allowed one, which is unknown here
        yield about.warn("job.sbatch", f"{what}, not for account {request.account}", "choose one of them with -A")


def _against(
    job: ResolvedJob, request: Request, partition: PartitionLimits, beyond: frozenset[str]
) -> Iterator[Finding]:
    """Return findings for one partition; `beyond` are the flags of the job QOS that override partition limits."""
    yield from _state(About(job, "partition"), partition)
    if partition.requires_reservation and not request.reservation:
        what = f"partition {partition.name} accepts no job outside a reservation (ReqResv)"
        yield About(job, "partition").refuse(
            "job.partition",
            what,
            "pass a reservation with --set job.sbatch=--reservation=NAME, or choose another partition with -p",
        )
    if "PartitionTimeLimit" not in beyond:
        yield from _time(About(job, "time"), request, partition)
    yield from _nodes(About(job, "nodes"), request, partition, beyond)
    yield from _parts_of_nodes(job, request, partition)
    yield from _who(job, request, partition)


def _state(about: About, partition: PartitionLimits) -> Iterator[Finding]:
    if partition.state in ("DRAIN", "INACTIVE"):
        yield about.refuse(
            "job.partition",
            f"partition {partition.name} is {partition.state} and accepts no jobs",
            "choose another with -p",
        )
    elif partition.state == "DOWN":
        yield about.warn(
            "job.partition",
            f"partition {partition.name} is DOWN: it queues jobs but starts none",
            "choose another with -p",
        )


def _time(about: About, request: Request, partition: PartitionLimits) -> Iterator[Finding]:
    most_s = partition.max_time_s
    if most_s is None or not request.has_time or (request.time_s is not None and request.time_s <= most_s):
        return
    yield about.refuse(
        "job.time",
        f"walltime {format_slurm_time(request.time_s)}, but partition {partition.name} allows at most {format_slurm_time(most_s)}",
        f'time = "{format_slurm_time(most_s)}"',
    )


def _nodes(about: About, request: Request, partition: PartitionLimits, beyond: frozenset[str]) -> Iterator[Finding]:
    asked = counted(request.min_nodes, "node")
    is_limited = partition.max_nodes is not None and "PartitionMaxNodes" not in beyond
    most = min(partition.max_nodes or 0, partition.total_nodes) if is_limited else partition.total_nodes
    if request.min_nodes > most:
        gives = "has" if most == partition.total_nodes else "allows at most"
        yield about.refuse("job.nodes", f"{asked}, but partition {partition.name} {gives} {most}", f"nodes = {most}")
    elif is_limited and request.max_nodes > (partition.max_nodes or 0):  # sbatch checks both ends of -N MIN-MAX
        up_to = f"up to {request.max_nodes} nodes, but partition {partition.name} allows at most {partition.max_nodes}"
        fits = f"{most}" if request.min_nodes == most else f'"{request.min_nodes}-{most}"'
        yield about.refuse("job.nodes", up_to, f"nodes = {fits}")
    if request.max_nodes < partition.min_nodes and "PartitionMinNodes" not in beyond:
        yield about.refuse(
            "job.nodes",
            f"{asked}, but partition {partition.name} requires at least {partition.min_nodes}",
            f"nodes = {partition.min_nodes}, or another partition",
        )


def _parts_of_nodes(job: ResolvedJob, request: Request, partition: PartitionLimits) -> Iterator[Finding]:
    most_cpus, most_mib = partition.max_cpus_per_node, partition.max_memory_per_node_mib
    if most_cpus is not None and request.cpus_per_node > most_cpus:
        yield About(job, "cpus").refuse(
            "job.cpus_per_rank",
            f"{counted(request.cpus_per_node, 'CPU')} per node, but partition {partition.name} allows at most {most_cpus}",
            cpu_fix(request, most_cpus),
        )
    if most_mib is not None and request.memory_mib is not None and request.memory_mib > most_mib:
        yield About(job, "memory").refuse(
            "job.mem_gb_per_node",
            f"{in_gib(request.memory_mib)} GiB per node, but partition {partition.name} allows at most {in_gib(most_mib)}",
            f"mem_gb_per_node = {int(most_mib // 1024)}",
        )


def _who(job: ResolvedJob, request: Request, partition: PartitionLimits) -> Iterator[Finding]:
    """Return findings on the accounts, QOS and groups of a partition."""
    for check, value, allowed, denied, letter in (
        ("account", request.account, partition.allow_accounts, partition.deny_accounts, "-A"),
        ("qos", request.qos, partition.allow_qos, partition.deny_qos, "-q"),
    ):
        if value and ((allowed and value not in allowed) or value in denied):
            fix = f"choose {' or '.join(allowed[:6])} with {letter}" if allowed else f"choose another with {letter}"
            what = f"partition {partition.name} accepts no jobs of {check} {value}"
            yield About(job, check).refuse(f"job.{check}", what, f"{fix}, or another partition")
    if partition.allow_groups and os.getuid() != 0 and not set(partition.allow_groups) & _own_groups():
        yield About(job, "partition").refuse(
            "job.partition",
            f"partition {partition.name} is restricted to groups that you are not in: {', '.join(partition.allow_groups[:6])}",
            "choose another with -p",
        )


def _own_groups() -> set[str]:
    names = set()
    for number in os.getgroups():
        try:
            names.add(grp.getgrgid(number).gr_name)
        except KeyError:  # slurm.conf cannot refer to a group without a name
            continue
    return names


def cpu_fix(request: Request, most: int) -> str:
    """Return the setting that reduces the CPUs per node to `most`."""
    fits = most // request.ranks_per_node
    return f"cpus_per_rank = {fits}" if fits else f"ranks_per_node = {most}"


def in_gib(mib: float) -> str:
    return f"{mib / 1024:.1f}".removesuffix(".0")


def _in_minutes(seconds: int) -> str:
    """Return `seconds` as a Slurm time, rounded down to whole minutes because Slurm counts those."""
    return format_slurm_time(max(60, seconds // 60 * 60))

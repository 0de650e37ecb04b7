"""Compare a request with accounting: the user's accounts and QOS; limits of association, QOS and partition QOS."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import counted
from toolkit.runs.record.job import Request
from toolkit.slurm.associations import Association, Limits
from toolkit.slurm.times import format_slurm_time
from toolkit.submission.preflight.cluster import Accounting, Cluster, default_qos
from toolkit.submission.preflight.finding import About, Finding
from toolkit.submission.preflight.partitions import in_gib
from toolkit.submission.sweep.split import fix_of_room

__all__ = ["against_accounts"]

# Slurm's name for a resource: (its name in messages, the key that requests it, the flag that requests it).
_RESOURCES = {
    "node": ("nodes", "job.nodes", "-N"),
    "cpu": ("CPUs", "job.cpus_per_rank", "-c"),
    "mem": ("GiB", "job.mem_gb_per_node", "--set job.mem_gb_per_node="),
    "gres/gpu": ("GPUs", "job.gpus_per_node", "--gpus-per-node"),
}


def against_accounts(job: ResolvedJob, request: Request, cluster: Cluster) -> Iterator[Finding]:
    """Yield findings on requests that accounting never allows this user; most such jobs would wait forever."""
    accounting = cluster.accounting
    if accounting is None or not cluster.enforces("associations", "limits", "qos", "safe"):
        return
    account = request.account or accounting.default_account
    mine = cluster.own(request)
    if not mine:
        yield _no_association(About(job, "account"), accounting, account)
        if cluster.enforces("qos") and request.qos and request.qos not in accounting.qos:
            yield _no_qos(About(job, "qos"), request, accounting)
        return
    if cluster.enforces("qos"):
        yield from _qos(About(job, "qos"), request, accounting, mine)
    if cluster.enforces("limits", "safe"):
        for whose, limits in _in_force(request, cluster, accounting, mine[0]):
            about = About(job, "limits")
            yield from _jobs(about, request, whose, limits, accounting.queued_against(whose, mine[0]))
            yield from _limits(about, request, whose, limits)


def _in_force(
    request: Request, cluster: Cluster, accounting: Accounting, mine: Association
) -> Iterator[tuple[str, Limits]]:
    """Return the limits that apply, with their owners: the partition QOS, the job QOS, the association, in this order.

    A limit that several owners set is returned only for the first of them. The order is Slurm's (resource_limits.html):
    a job QOS with the flag OverPartQOS precedes the partition QOS.
    """
    partition = next(iter(cluster.chosen(request)), None)
    qos = request.qos or default_qos([mine])
    names = list(dict.fromkeys(filter(None, (partition.qos if partition else "", qos))))
    if "OverPartQOS" in accounting.qos.get(qos, Limits()).flags:
        names.reverse()
    sources = [(f"QOS {name}", accounting.qos.get(name, Limits())) for name in names]
    taken: set[tuple[str, str]] = set()
    for whose, limits in [*sources, (f"account {mine.account}", mine.limits)]:
        left: dict[str, Any] = {}
        for name, value in vars(limits).items():
            if isinstance(value, Mapping):
                left[name] = {tres: most for tres, most in value.items() if (name, tres) not in taken}
                taken |= {(name, tres) for tres in value}
            elif isinstance(value, int):
                left[name] = None if (name, "") in taken else value
                taken.add((name, ""))
        yield whose, replace(limits, **left)


def _no_association(about: About, accounting: Accounting, account: str) -> Finding:
    contact = about.job.site.contact
    accounts = list(dict.fromkeys(one.account for one in accounting.associations if not one.partition))
    limited = [f"{one.account} in {one.partition}" for one in accounting.associations if one.partition]
    if account:
        what = f"{accounting.user} may not charge account {account}"
    else:
        what = f"the job sets no account, and {accounting.user} has no default account"
    if accounts or limited:
        fix = f"choose one of yours with -A: {', '.join([*accounts, *limited][:8])}"
    else:
        fix = f"ask {contact or 'the site'} for an account"
    return about.refuse("job.account", what, fix)


def _no_qos(about: About, request: Request, accounting: Accounting) -> Finding:
    what = f"this cluster has no QOS {request.qos!r}"
    return about.refuse("job.qos", what, f"choose one of {', '.join([*accounting.qos][:8])} with -q, or omit it")


def _qos(about: About, request: Request, accounting: Accounting, mine: Sequence[Association]) -> Iterator[Finding]:
    allowed = list(dict.fromkeys(name for one in mine for name in one.qos))
    if request.qos and request.qos not in allowed:
        known = request.qos in accounting.qos
        yield about.refuse(
            "job.qos",
            f"account {mine[0].account} may not use QOS {request.qos}"
            if known
            else f"this cluster has no QOS {request.qos}",
            f"choose one of {', '.join(allowed[:8])} with -q" if allowed else "omit -q",
        )


def _limits(about: About, request: Request, whose: str, limits: Limits) -> Iterator[Finding]:
    if limits.longest_s is not None and request.has_time:
        yield from _time(about, request, whose, limits.longest_s)
    asked = request.tres(request.min_nodes)
    on_node = request.tres(1)
    for most, have, words in (
        (limits.most_for_job, asked, "per job"),
        (limits.most_on_node, on_node, "per node"),
        (limits.most_of_user, asked, "for all jobs of a user"),
        (limits.most_of_group, asked, "for all its jobs together"),
    ):
        yield from _above(about, whose, words, have, most)
    yield from _minutes(about, request, whose, limits)
    for name, least in limits.least_for_job.items():
        count = request.tres(request.max_nodes).get(name, 0.0)
        if name in _RESOURCES and count < least and name != "mem":
            what, key, flag = _RESOURCES[name]
            yield about.refuse(
                key,
                f"{count:.0f} {what}, but {whose} requires at least {least:.0f} per job",
                f"request more with {flag}",
            )


def _time(about: About, request: Request, whose: str, longest_s: int) -> Iterator[Finding]:
    if request.time_s is None or request.time_s > longest_s:
        most = format_slurm_time(longest_s)
        yield about.refuse(
            "job.time",
            f"walltime {format_slurm_time(request.time_s)}, but {whose} allows at most {most}",
            f'time = "{most}"',
        )


def _jobs(about: About, request: Request, whose: str, limits: Limits, queued: int) -> Iterator[Finding]:
    """Yield findings on too many jobs: `queued` is how many this user has; those of others are unknown."""
    if limits.running_jobs == 0:
        yield about.refuse("job.account", f"{whose} allows no jobs", "choose another account (-A) or QOS (-q)")
    submitted = (limits.submitted_jobs, limits.submitted_jobs_of_group)
    most = min((one for one in submitted if one is not None), default=None)
    if most is None or request.tasks + queued <= most:
        return
    beside = f" in addition to {queued} of yours" if queued else ""
    what = f"{counted(request.tasks, 'job')}{beside}, but {whose} allows at most {most} in the queue"
    if request.array is not None:
        yield about.refuse("job.array", what, fix_of_room(sorted(request.array), max(0, most - queued)))
    else:
        wait = "wait, or " if most else ""
        yield about.refuse("job.account", what, f"{wait}choose another account (-A) or QOS (-q)")


def _above(
    about: About, whose: str, words: str, have: Mapping[str, float], most: Mapping[str, float]
) -> Iterator[Finding]:
    for name, limit in most.items():
        kind = name.partition(":")[0]
        if have.get(name, 0.0) <= limit or kind not in _RESOURCES:
            continue
        what, key, flag = _RESOURCES[kind]
        typed = f" of type {name.partition(':')[2]}" if ":" in name else ""
        yield about.refuse(
            key,
            f"{_count(kind, have[name])} {what}{typed}, but {whose} allows at most {_count(kind, limit)} {words}",
            f"request less with {flag}, or choose another account or QOS",
        )


def _minutes(about: About, request: Request, whose: str, limits: Limits) -> Iterator[Finding]:
    """Return findings on MaxTRESMins: resources times the requested time."""
    if request.time_s is None:
        return
    asked = {name: count * request.time_s / 60 for name, count in request.tres(request.min_nodes).items()}
    for name, limit in limits.most_for_job_minutes.items():
        kind = name.partition(":")[0]
        if asked.get(name, 0.0) > limit and kind in _RESOURCES:
            what = _RESOURCES[kind][0]
            yield about.refuse(
                "job.time",
                f"{asked[name]:.0f} {what} x minutes, but {whose} allows at most {limit:.0f} per job",
                f'time = "{format_slurm_time(int(limit / asked[name] * request.time_s) // 60 * 60)}", or request less',
            )


def _count(kind: str, count: float) -> str:
    return in_gib(count) if kind == "mem" else f"{count:.0f}"

"""Slurm's pending reasons: what each means, whether such a job can ever start, and the fix.

Source: squeue(1), "JOB REASON CODES", and slurm.schedmd.com/job_reason_codes.html, Slurm 22.05 to 24.11.
Accounting limits have some two hundred names of a few patterns; they are read by pattern. A reason that is not
here stays unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class CanStart(StrEnum):
    """Whether a waiting job can start as it stands."""

    YES = "yes"
    NOT_BEFORE = "not_before"  # something that will happen by itself, or at a known time, comes first
    NEVER = "never"  # not until the job or the cluster is changed
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class PendingReason:
    """One reason. `fix` may hold {job}, {run} and {partition}; "" where waiting is all there is to do."""

    words: str
    can_start: CanStart
    fix: str = ""


_ASK_LESS = "`toolkit cancel {run}`, then submit it with less"
_RESUBMIT = "`toolkit cancel {run}`, then submit it with"
_ADMIN = "ask the site's administrators"
_Y, _L, _N, _U = CanStart.YES, CanStart.NOT_BEFORE, CanStart.NEVER, CanStart.UNKNOWN

_REASONS: dict[str, PendingReason] = {
    "None": PendingReason("Slurm has not looked at the job yet", _Y),
    "Priority": PendingReason("jobs of a higher priority come first", _Y),
    "Resources": PendingReason("it is the next one, and waits for nodes to become free", _Y),
    "BeginTime": PendingReason("its earliest start has not come yet", _L),
    "Cleaning": PendingReason("its last life is still being cleaned up", _L),
    "Prolog": PendingReason("the site's prolog is preparing its nodes", _Y),
    "Dependency": PendingReason("it waits for another job", _L),
    "DependencyNeverSatisfied": PendingReason(
        "it waits for another job to end in a way that can no longer happen", _N,
        "`scontrol update JobId={job} Dependency=` starts it all the same; `toolkit cancel {run}` drops it",
    ),
    "JobHeldUser": PendingReason("its user holds it", _N, "`scontrol release {job}`"),
    "JobHeldAdmin": PendingReason("an administrator holds it; users cannot release it", _N, _ADMIN),
    "JobHoldMaxRequeue": PendingReason(
        "it was requeued too often, and Slurm holds it", _N, "`toolkit logs {run}` says why; then `scontrol release {job}`",
    ),
    "JobArrayTaskLimit": PendingReason(
        "its array already runs as many tasks as it allows at a time", _L,
        "`scontrol update JobId={job} ArrayTaskThrottle=N` allows N at a time",
    ),
    "PartitionTimeLimit": PendingReason(
        "it requests more time than its partition allows", _N, f"{_RESUBMIT} less time (-t) or another partition (-p)",
    ),
    "PartitionNodeLimit": PendingReason(
        "it requests more nodes than its partition has, or nodes that are down", _N,
        f"{_RESUBMIT} fewer nodes (-N) or another partition (-p)",
    ),
    "PartitionConfig": PendingReason(
        "its partition's configuration rules it out", _N, f"`scontrol show partition {{partition}}` shows the limits; {_RESUBMIT} another partition (-p)",
    ),
    "PartitionDown": PendingReason("its partition takes jobs but starts none (state DOWN)", _L, _ADMIN),
    "PartitionInactive": PendingReason("its partition is inactive", _L, _ADMIN),
    "AccountNotAllowed": PendingReason(
        "its partition does not take its account", _N, f"{_RESUBMIT} another account (-A) or partition (-p)",
    ),
    "QOSNotAllowed": PendingReason(
        "its partition or association does not take its QOS", _N, f"{_RESUBMIT} another QOS (-q)",
    ),
    "InvalidAccount": PendingReason(
        "its account is not valid", _N, f"`sacctmgr show associations user=$USER` lists yours; {_RESUBMIT} one of them (-A)",
    ),
    "InvalidQOS": PendingReason(
        "its QOS is not valid", _N, f"`sacctmgr show associations user=$USER format=account,qos` lists yours; {_RESUBMIT} one of them (-q)",
    ),
    "BadConstraints": PendingReason(
        "no nodes of its partition fit its request", _N,
        f"`sinfo -p {{partition}} -N -o '%N %c %m %G %f'` shows what there is; {_RESUBMIT} that",
    ),
    "NodeDown": PendingReason("a node that it must have is down", _L, "take the node out of -w, or wait for its return"),
    "ReqNodeNotAvail": PendingReason(
        "a node that it must have cannot be used now: down, drained, reserved, or kept for maintenance", _L,
        "take the node out of -w, or wait for its return",
    ),
    "Reservation": PendingReason("its reservation has not begun, or is full", _L),
    "ReservationDeleted": PendingReason(
        "its reservation was deleted", _N, "`scontrol update JobId={job} ReservationName=` runs it without one",
    ),
    "Licenses": PendingReason("it waits for a licence", _L),
    "BurstBufferResources": PendingReason("it waits for room in the burst buffer", _L),
    "BurstBufferStageIn": PendingReason("its files are being staged in", _L),
    "BurstBufferOperation": PendingReason("its burst buffer failed", _N, _ADMIN),
    "FrontEndDown": PendingReason("no front-end node can start it", _L, _ADMIN),
    "DeadLine": PendingReason("it can no longer end before its --deadline", _N, f"{_RESUBMIT} a later --deadline"),
    "QOSUsageThreshold": PendingReason("the account has used too much for this QOS", _L, f"{_RESUBMIT} another QOS (-q)"),
    "AssociationJobLimit": PendingReason("the account has as many jobs as it may", _L),
    "AssociationResourceLimit": PendingReason("the account uses as much as it may", _L),
    "AssociationTimeLimit": PendingReason("the account's time is used up", _L),
    "QOSJobLimit": PendingReason("the QOS has as many jobs as it may", _L),
    "QOSResourceLimit": PendingReason("the QOS uses as much as it may", _L),
    "QOSTimeLimit": PendingReason("the QOS's time is used up", _L),
    "AccountingPolicy": PendingReason("an accounting limit holds it back", _L),
    "MaxMemPerLimit": PendingReason("it requests more memory than a job may have", _N, f"{_ASK_LESS} memory"),
    "JobLaunchFailure": PendingReason("Slurm could not start its script", _N, "`toolkit explain {run}` once it has ended"),
    "SystemFailure": PendingReason("Slurm, a file system or the network failed", _U, _ADMIN),
    "InactiveLimit": PendingReason("it did nothing for longer than the site allows", _U, _ADMIN),
    "PowerNotAvail": PendingReason("there is not enough power for its nodes", _L),
    "PowerReserved": PendingReason("power is reserved for other jobs", _L),
    "FedJobLock": PendingReason("another cluster of the federation is looking at it", _Y),
    "SchedDefer": PendingReason("Slurm considers it in the next scheduling round", _Y),
    "Nodes_required_for_job_are_DOWN": PendingReason(
        "too many nodes of its partition are down, drained or reserved", _L,
        "`sinfo -p {partition} -R` shows the reason; wait, or request fewer nodes (-N)",
    ),
    "launch_failed_requeued_held": PendingReason(
        "it could not be started on its nodes; Slurm requeued it and holds it", _N, "`scontrol release {job}` tries again",
    ),
    "job_requeued_in_held_state": PendingReason("it was requeued, and is held", _N, "`scontrol release {job}`"),
}  # fmt: skip
# What `ReqNodeNotAvail` means for a job that requests no node by name.
_NODES_NOT_FREE = PendingReason(
    "nodes that it could have cannot be used now: down, drained, reserved, or kept for maintenance", _L,
    "`scontrol show reservation` shows what keeps nodes, and until when; a job with a shorter -t may end before it begins",
)  # fmt: skip

# AssocGrpCpuLimit, QOSMaxGRESPerUser, MaxCpuPerAccount, ...: whose limit, and of what.
_OWNERS = {"Assoc": "your association (account)", "QOS": "the QOS"}
_RESOURCES = {
    "cpu": "CPUs", "gres": "GPUs (GRES)", "mem": "memory", "memory": "memory", "node": "nodes", "jobs": "jobs",
    "submitjobs": "submitted jobs", "submitjob": "submitted jobs", "wall": "total time", "wallduration": "time",
    "bb": "burst buffer", "license": "licences", "energy": "energy", "billing": "billing units", "unknown": "a resource",
}  # fmt: skip
_LIMIT = re.compile(
    r"(?P<owner>Assoc|QOS)?(?P<kind>Grp|Max|Min)(?P<resource>[A-Za-z]+?)(?P<run>Run)?(?P<minutes>Minutes)?"
    r"(?P<per>Per(?:Job|Node|User|Account))?(?:Limit|NotSatisfied)?"
)


def reason_name(said: str) -> str:
    """Slurm's reason without what follows it: `ReqNodeNotAvail, UnavailableNodes:node3` is ReqNodeNotAvail."""
    name = said.strip().strip("()").partition(",")[0].strip()
    for sentence in ("Nodes required for job are DOWN", "launch failed requeued held", "job requeued in held state"):
        if sentence.replace(" ", "") in name.replace("_", "").replace(" ", ""):
            return sentence.replace(" ", "_")
    return name


def pending_reason(said: str, *, names_nodes: bool = True) -> PendingReason:
    """The meaning of a reason as squeue or scontrol print it. `names_nodes`: the job requests nodes by their names."""
    name = reason_name(said)
    if name == "ReqNodeNotAvail" and not names_nodes:
        return _NODES_NOT_FREE
    known = _REASONS.get(name) or _accounting_limit(name)
    if known is not None:
        return known
    return PendingReason(f"Slurm says {name}, which its manual does not list", CanStart.UNKNOWN, _ADMIN)


def _accounting_limit(name: str) -> PendingReason | None:
    """A limit of an association or a QOS. A group's is shared and frees itself; one of a single job does not."""
    match = _LIMIT.fullmatch(name)
    if match is None or match["resource"].lower() not in _RESOURCES:
        return None
    owner = _OWNERS.get(match["owner"] or "", "your account under this QOS")
    what = _RESOURCES[match["resource"].lower()] + (" minutes" if match["minutes"] else "")
    if match["kind"] == "Min":
        return PendingReason(f"it requests less {what} than {owner} requires of a job", _N, f"{_RESUBMIT} more {what}")
    of_one_job = match["per"] in ("PerJob", "PerNode") or match["resource"] == "WallDuration"
    if match["kind"] == "Max" and of_one_job:
        return PendingReason(f"it requests more {what} than {owner} allows one job", _N, f"{_ASK_LESS} {what}")
    if match["minutes"] and not match["run"]:
        return PendingReason(f"{owner} has used up its {what}", _L, "wait for the next accounting period, or " + _ADMIN)
    verb = "has" if "jobs" in what else "uses"
    return PendingReason(f"{owner} {verb} as many {what} as it may; jobs that end make room", _L)

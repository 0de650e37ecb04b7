"""Explain the reasons for which Slurm keeps a job pending: the meaning, whether the job can ever start, and the fix.

Source: squeue(1), "JOB REASON CODES", and slurm.schedmd.com/job_reason_codes.html, Slurm 22.05 to 26.05. Accounting
limits have about two hundred reason names, which a few patterns match.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["CanStart", "pending_reason", "reason_name"]


class CanStart(StrEnum):
    """Whether a pending job can start unchanged."""

    YES = "yes"
    NOT_BEFORE = "not_before"  # can start after an event that needs no action, or at a known time
    NEVER = "never"  # cannot start until a user changes the job, or an administrator changes the cluster
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class PendingReason:
    """A reason and its explanation. `fix` may contain {job}, {run} and {partition}; "" if the user can only wait."""

    words: str
    can_start: CanStart
    fix: str = ""


_ASK_LESS = "`toolkit cancel {run}`, then submit it again with less"
_RESUBMIT = "`toolkit cancel {run}`, then submit it again with"
_ADMIN = "ask the site's administrators"
_Y, _L, _N, _U = CanStart.YES, CanStart.NOT_BEFORE, CanStart.NEVER, CanStart.UNKNOWN

_REASONS: dict[str, PendingReason] = {
    "None": PendingReason("Slurm has not considered the job yet", _Y),
    "Priority": PendingReason("jobs with a higher priority are first", _Y),
    "Resources": PendingReason("it is the next job, and is waiting for free nodes", _Y),
    "BeginTime": PendingReason("its earliest start time is in the future", _L),
    "Cleaning": PendingReason("its previous run is still being cleaned up", _L),
    "Prolog": PendingReason("the site's prolog is preparing its nodes", _Y),
    "Dependency": PendingReason("it is waiting for another job", _L),
    "DependencyNeverSatisfied": PendingReason(
        "it depends on a result of another job that can no longer occur", _N,
        "`scontrol update JobId={job} Dependency=` starts it anyway; `toolkit cancel {run}` drops it",
    ),
    "JobHeldUser": PendingReason("its user holds it", _N, "`scontrol release {job}`"),
    "JobHeldAdmin": PendingReason("an administrator put it on hold; users cannot release it", _N, _ADMIN),
    "JobHoldMaxRequeue": PendingReason(
        "it was requeued too often, so Slurm put it on hold", _N, "`toolkit logs {run}` shows why; then `scontrol release {job}`",
    ),
    "JobArrayTaskLimit": PendingReason(
        "its array already runs as many tasks as it may at a time", _L,
        "`scontrol update JobId={job} ArrayTaskThrottle=N` allows N at a time",
    ),
    "PartitionTimeLimit": PendingReason(
        "it requests more time than its partition allows", _N, f"{_RESUBMIT} less time (-t) or another partition (-p)",
    ),
    "PartitionNodeLimit": PendingReason(
        "it requests more nodes than its partition allows, or nodes that are down", _N,
        f"{_RESUBMIT} fewer nodes (-N) or another partition (-p)",
    ),
    "PartitionConfig": PendingReason(
        "its partition's configuration excludes it", _N, f"`scontrol show partition {{partition}}` shows the limits; {_RESUBMIT} another partition (-p)",
    ),
    "PartitionDown": PendingReason("its partition accepts jobs but starts none (state DOWN)", _L, _ADMIN),
    "PartitionInactive": PendingReason("its partition is inactive", _L, _ADMIN),
    "AccountNotAllowed": PendingReason(
        "its partition does not accept its account", _N, f"{_RESUBMIT} another account (-A) or partition (-p)",
    ),
    "QOSNotAllowed": PendingReason(
        "its partition or association does not accept its QOS", _N, f"{_RESUBMIT} another QOS (-q)",
    ),
    "InvalidAccount": PendingReason(
        "its account is not valid", _N, f"`sacctmgr show associations user=$USER` lists yours; {_RESUBMIT} one of them (-A)",
    ),
    "InvalidQOS": PendingReason(
        "its QOS is not valid", _N, f"`sacctmgr show associations user=$USER format=account,qos` lists yours; {_RESUBMIT} one of them (-q)",
    ),
    "BadConstraints": PendingReason(
        "no nodes of its partition have the requested resources", _N,
        f"`sinfo -p {{partition}} -N -o '%N %c %m %G %f'` shows the available resources; {_RESUBMIT} those",
    ),
    "NodeDown": PendingReason("a requested node is down", _L, "remove the node from -w, or wait for its return"),
    "ReqNodeNotAvail": PendingReason(
        "a requested node cannot be used now: down, drained, reserved, or kept for maintenance", _L,
        "remove the node from -w, or wait for its return",
    ),
    "Reservation": PendingReason("its reservation has not started, or is full", _L),
    "ReservationDeleted": PendingReason(
        "its reservation was deleted", _N, "`scontrol update JobId={job} ReservationName=` runs it without one",
    ),
    "Licenses": PendingReason("it is waiting for a licence", _L),
    "BurstBufferResources": PendingReason("it is waiting for free space in the burst buffer", _L),
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
    "InactiveLimit": PendingReason("it was inactive for longer than the site allows", _U, _ADMIN),
    "Constraints": PendingReason("nodes with the features that it requests (-C) are unavailable now", _L),
    "MpiPortsBusy": PendingReason("all ports reserved for MPI are in use", _L),
    "NvidiaImexChannels": PendingReason("all NVIDIA IMEX channels are in use", _L),
    "PowerNotAvail": PendingReason("there is not enough power for its nodes", _L),
    "PowerReserved": PendingReason("power is reserved for other jobs", _L),
    "FedJobLock": PendingReason("another cluster of the federation is considering it", _Y),
    "SchedDefer": PendingReason("Slurm will consider it in the next scheduling cycle", _Y),
    "Nodes_required_for_job_are_DOWN": PendingReason(
        "too many nodes of its partition are down, drained or reserved", _L,
        "`sinfo -p {partition} -R` shows why; wait, or request fewer nodes (-N)",
    ),
    "launch_failed_requeued_held": PendingReason(
        "it could not be started on its nodes; Slurm requeued it and put it on hold", _N, "`scontrol release {job}` tries again",
    ),
    "job_requeued_in_held_state": PendingReason("it was requeued, and is on hold", _N, "`scontrol release {job}`"),
}  # fmt: skip
# The meaning of `ReqNodeNotAvail` for a job that does not request nodes by name.
_NODES_NOT_FREE = PendingReason(
    "nodes that it could use are unavailable now: down, drained, reserved, or kept for maintenance", _L,
    "`scontrol show reservation` shows what reserves nodes, and until when; a job with a shorter -t may finish before that starts",
)  # fmt: skip

# AssocGrpCpuLimit, QOSMaxGRESPerUser, MaxCpuPerAccount, ...: the owner and the resource of a limit.
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


def reason_name(reason: str) -> str:
    """Return a reason without its details: ReqNodeNotAvail for `ReqNodeNotAvail, UnavailableNodes:node3`."""
    name = reason.strip().strip("()").partition(",")[0].strip()
    for sentence in ("Nodes required for job are DOWN", "launch failed requeued held", "job requeued in held state"):
        if sentence.replace(" ", "") in name.replace("_", "").replace(" ", ""):
            return sentence.replace(" ", "_")
    return name


def pending_reason(reason: str, *, names_nodes: bool = True) -> PendingReason:
    """Return the meaning of a reason from squeue or scontrol; `names_nodes` is whether the job requests nodes by name."""
    name = reason_name(reason)
    if name == "ReqNodeNotAvail" and not names_nodes:
        return _NODES_NOT_FREE
    meaning = _REASONS.get(name) or _accounting_limit(name)
    if meaning is not None:
        return meaning
    return PendingReason(f"the reason is {name}, which the Slurm manual does not explain", CanStart.UNKNOWN, _ADMIN)


def _accounting_limit(name: str) -> PendingReason | None:
    """Return the meaning of an association or QOS limit. Other jobs use up a group limit, but not a per-job limit."""
    match = _LIMIT.fullmatch(name)
    if match is None or match["resource"].lower() not in _RESOURCES:
        return None
    owner = _OWNERS.get(match["owner"] or "", "your account under this QOS")
    resource = _RESOURCES[match["resource"].lower()] + (" minutes" if match["minutes"] else "")
    if match["kind"] == "Min":
        return PendingReason(f"it requests less {resource} than {owner} requires", _N, f"{_RESUBMIT} more {resource}")
    of_one_job = match["per"] in ("PerJob", "PerNode") or match["resource"] == "WallDuration"
    if match["kind"] == "Max" and of_one_job:
        return PendingReason(f"it requests more {resource} than {owner} allows per job", _N, f"{_ASK_LESS} {resource}")
    if match["minutes"] and not match["run"]:
        return PendingReason(
            f"{owner} has used up its {resource}", _L, "wait for the next accounting period, or " + _ADMIN
        )
    verb = "has" if "jobs" in resource else "uses"
    return PendingReason(f"{owner} {verb} as many {resource} as it may; it can start when other jobs finish", _L)

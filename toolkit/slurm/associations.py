"""Read the accounts, QOS and limits of a user from sacctmgr, and the user's queued jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.slurm.commands import Slurm
from toolkit.slurm.records import UnreadableError, new_mark, read_records, whole_number
from toolkit.slurm.sbatch_options import parse_tres
from toolkit.slurm.times import printed_limit_s

__all__ = ["Association", "Limits", "QueuedJob", "associations_of", "default_account", "every_qos", "queued_jobs"]

_LIMITS = ("MaxWall", "MaxTRES", "MaxTRESPerNode", "MaxTRESMins", "GrpTRES", "GrpJobs", "GrpSubmitJobs")
_OF_ASSOCIATION = ("Cluster", "Account", "Partition", "QOS", "DefaultQOS", "MaxJobs", "MaxSubmitJobs", *_LIMITS)
_OF_QOS = ("Name", "Flags", "MinTRES", "MaxTRESPerUser", "MaxJobsPerUser", "MaxSubmitJobsPerUser", *_LIMITS)


@dataclass(frozen=True)
class Limits:
    """Limits per job, or for all jobs of a user or a group together; None and {} mean no limit.

    Resources are named as Slurm TRES; `most_for_job_minutes` limits resources times minutes.
    """

    longest_s: int | None = None
    least_for_job: Mapping[str, float] = field(default_factory=dict)
    most_for_job: Mapping[str, float] = field(default_factory=dict)
    most_on_node: Mapping[str, float] = field(default_factory=dict)
    most_for_job_minutes: Mapping[str, float] = field(default_factory=dict)
    most_of_user: Mapping[str, float] = field(default_factory=dict)
    most_of_group: Mapping[str, float] = field(default_factory=dict)
    running_jobs: int | None = None
    submitted_jobs: int | None = None
    submitted_jobs_of_group: int | None = None
    flags: frozenset[str] = frozenset()  # flags of a QOS, such as PartitionTimeLimit


@dataclass(frozen=True)
class Association:
    """The permission of a user to charge an account, in one partition or, if `partition` is "", in all."""

    account: str
    partition: str
    qos: tuple[str, ...]
    default_qos: str
    limits: Limits


@dataclass(frozen=True)
class QueuedJob:
    """A pending or running job or array task, with the account, QOS and partition whose limits count it."""

    account: str
    qos: str
    partition: str


def queued_jobs(slurm: Slurm, user: str) -> list[QueuedJob]:
    """Return the jobs of a user in the queue, each array task separately; errors as in `Slurm.call`."""
    mark = new_mark()
    columns = mark.join(("%i", "%a", "%q", "%P", "%i", ""))
    text = slurm.call(["squeue", f"--user={user}", "--array", "--noheader", f"--format={columns}"])
    return [QueuedJob(*cells[1:-1]) for cells in read_records("squeue", text, mark, 5)]


def associations_of(slurm: Slurm, user: str, cluster: str = "") -> list[Association]:
    """Return the associations of a user on a cluster ("" for all) with inherited limits; errors as in `Slurm.call`."""
    where = [f"cluster={cluster}"] if cluster else []
    rows = _ask(slurm, ["show", "associations", f"user={user}", *where], _OF_ASSOCIATION)
    return [
        Association(
            row["Account"], row["Partition"], tuple(filter(None, row["QOS"].split(","))), row["DefaultQOS"],
            _limits(row, jobs=("MaxJobs", "GrpJobs"), submitted="MaxSubmitJobs"),
        )
        for row in rows
    ]  # fmt: skip


def default_account(slurm: Slurm, user: str, cluster: str) -> str:
    """Return the account that Slurm charges if a job does not set one, or ""; errors as in `Slurm.call`."""
    rows = _ask(slurm, ["show", "user", user, "withassoc", f"cluster={cluster}"], ("User", "DefaultAccount"))
    return next((row["DefaultAccount"] for row in rows), "")


def every_qos(slurm: Slurm) -> dict[str, Limits]:
    """Return the limits of each QOS by name; errors as in `Slurm.call`."""
    return {
        row["Name"]: _limits(row, jobs=("MaxJobsPerUser", "GrpJobs"), submitted="MaxSubmitJobsPerUser")
        for row in _ask(slurm, ["show", "qos"], _OF_QOS)
    }


def _ask(slurm: Slurm, query: Sequence[str], columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a query. sacctmgr supports only the delimiter `|`, which names in accounting cannot contain."""
    text = slurm.call(["sacctmgr", "--noheader", "--parsable2", *query, "format=" + ",".join(columns)])
    rows = []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = line.split("|")
        if len(cells) != len(columns):
            raise UnreadableError("sacctmgr", line)
        rows.append(dict(zip(columns, cells, strict=True)))
    return rows


def _limits(row: Mapping[str, str], *, jobs: Sequence[str], submitted: str) -> Limits:
    return Limits(
        longest_s=printed_limit_s(row["MaxWall"]), least_for_job=parse_tres(row.get("MinTRES", "")),
        most_for_job=parse_tres(row["MaxTRES"]), most_on_node=parse_tres(row["MaxTRESPerNode"]),
        most_for_job_minutes=parse_tres(row["MaxTRESMins"]),
        most_of_user=parse_tres(row.get("MaxTRESPerUser", "")), most_of_group=parse_tres(row["GrpTRES"]),
        running_jobs=_least(row, jobs), submitted_jobs=_least(row, [submitted]),
        submitted_jobs_of_group=_least(row, ["GrpSubmitJobs"]),
        flags=frozenset(filter(None, row.get("Flags", "").split(","))),
    )  # fmt: skip


def _least(row: Mapping[str, str], names: Sequence[str]) -> int | None:
    return min((count for name in names if (count := whole_number(row[name])) is not None), default=None)

"""What squeue and sacct say of jobs, read so that no name, comment or damaged line can pass for a state.

A record begins and ends with its job id; records.py documents how records are separated.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from toolkit.rundir.states import RunState
from toolkit.slurm.array import parse_array
from toolkit.slurm.records import UnreadableError, read_records
from toolkit.slurm.states import run_state

# squeue's --Format types and sacct's --format fields, in our order.
_QUEUE = (
    "JobArrayID",
    "State",
    "Reason",
    "NodeList",
    "TimeLeft",
    "StartTime",
    "EligibleTime",
    "RestartCnt",
    "Comment",
    "Partition",
    "NumNodes",
    "TimeLimit",
    "EndTime",
    "Dependency",
    "ReqNodes",
    "JobArrayID",
)
_ACCOUNTS = ("JobID", "State", "ExitCode", "NodeList", "Submit", "JobID")
# `5_*` is Slurm's word for the tasks of array 5 that wait, where it does not list them.
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+|_\[[0-9,:%-]+\]|_\*)?(\+[0-9]+)?", re.ASCII)
_CANCELLED_BY = re.compile(r"CANCELLED by ([0-9]+)", re.ASCII)


@dataclass(frozen=True)
class JobFacts:
    """What Slurm says of one job or of one task of an array (`123_4`). "" and None mean unknown.

    `state` is Slurm's own word. Times are Slurm's local ones, `2026-11-21T02:48:01`; `start_time` of a waiting job is
    an estimate. `restarts` counts the requeues. `cancelled_by` is a user's number, which only sacct tells. The fields
    from `partition` to `required_nodes` only squeue tells. `cluster` is the one that was asked by its name.
    """

    job_id: str
    state: str
    reason: str = ""
    nodes: str = ""
    time_left: str = ""
    exit_code: str = ""
    source: str = ""
    start_time: str = ""
    eligible_time: str = ""
    restarts: int | None = None
    comment: str = ""
    cancelled_by: int | None = None
    partition: str = ""
    node_count: str = ""
    time_limit: str = ""
    end_time: str = ""
    dependency: str = ""
    required_nodes: str = ""
    cluster: str = ""


def squeue_argv(jobs: Iterable[str], mark: str) -> list[str]:
    """The arguments that query jobs of every state and partition; `jobs` without task numbers."""
    form = ",".join(f"{name}:{mark}" for name in _QUEUE)
    return ["squeue", "--noheader", "--all", "--states=all", f"--Format={form}", "--jobs=" + ",".join(jobs)]


def sacct_argv(jobs: Iterable[str], mark: str) -> list[str]:
    """Ask accounting for whole jobs, not their steps."""
    return ["sacct", "--noheader", "--parsable", f"--delimiter={mark}", "--allocations",
            "--format=" + ",".join(_ACCOUNTS), "--jobs=" + ",".join(jobs)]  # fmt: skip


def read_squeue(text: str, mark: str) -> list[JobFacts]:
    """The rows of `squeue_argv`'s answer.

    Raises:
        UnreadableError: it holds anything else.
    """
    return [
        JobFacts(
            row["JobArrayID"], row["State"], row["Reason"], row["NodeList"], row["TimeLeft"], source="squeue",
            start_time=row["StartTime"], eligible_time=row["EligibleTime"], comment=row["Comment"],
            restarts=int(row["RestartCnt"]) if _is_number(row["RestartCnt"]) else None, partition=row["Partition"],
            node_count=row["NumNodes"], time_limit=row["TimeLimit"], end_time=row["EndTime"],
            dependency=row["Dependency"], required_nodes=row["ReqNodes"],
        )
        for row in _records("squeue", text, mark, _QUEUE)
    ]  # fmt: skip


def read_sacct(text: str, mark: str) -> list[JobFacts]:
    """The rows of `sacct_argv`'s answer; of a job that was requeued, the life that was submitted last.

    Raises:
        UnreadableError: it holds anything else.
    """
    newest: dict[str, tuple[str, JobFacts]] = {}
    for row in _records("sacct", text, mark, _ACCOUNTS):
        by = _CANCELLED_BY.fullmatch(row["State"])
        facts = JobFacts(
            row["JobID"], row["State"], nodes=row["NodeList"], exit_code=row["ExitCode"], source="sacct",
            cancelled_by=int(by[1]) if by else None,
        )  # fmt: skip
        if facts.job_id not in newest or row["Submit"] >= newest[facts.job_id][0]:
            newest[facts.job_id] = (row["Submit"], facts)
    return [facts for _, facts in newest.values()]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _records(command: str, text: str, mark: str, names: Sequence[str]) -> list[dict[str, str]]:
    records = read_records(command, text, mark, len(names), key=_JOB_ID)
    return [dict(zip(names, record, strict=True)) for record in records]


def base_of(job_id: str) -> str:
    """The number that squeue and sacct take: `123` of `123_4`, `123_[5-9%2]` and `123+1`."""
    return re.split(r"[_+]", job_id, maxsplit=1)[0]


def of_jobs(rows: Iterable[JobFacts], wanted: Collection[str]) -> dict[str, JobFacts]:
    """The facts of the wanted jobs among some rows.

    A waiting task of an array shares one row with the others (`123_[5-9%2]`). An array or a heterogeneous job that
    is asked for as a whole is the part of it that is furthest from its end.
    """
    found: dict[str, JobFacts] = {}
    parts: dict[str, list[JobFacts]] = {}
    for row in rows:
        found.setdefault(row.job_id, row)
        parts.setdefault(base_of(row.job_id), []).append(row)
    for job_id in wanted:
        base, _, task = job_id.partition("_")
        if job_id in found or base not in parts:
            continue
        if not task:
            found[job_id] = replace(min(parts[base], key=_nearness_to_end), job_id=job_id)
        for part in parts[base]:
            if task and _holds(part.job_id, int(task)):
                found[job_id] = replace(part, job_id=job_id)
    return {job_id: found[job_id] for job_id in wanted if job_id in found}


def _nearness_to_end(part: JobFacts) -> tuple[int, int]:
    """Of several parts the one that runs says most, then one that waits, then the last that ended."""
    state, number = run_state(part.state), part.job_id.partition("_")[2]
    return 2 if state.final else int(state is RunState.PENDING), -int(number) if _is_number(number) else 0


def _holds(job_id: str, task: int) -> bool:
    """Whether the row of `123_[5-9%2]` or `123_*` has a task."""
    if job_id.endswith("_*"):
        return True  # each that has no row of its own
    _, bracket, tasks = job_id.partition("_[")
    return bool(bracket) and task in _tasks(tasks.removesuffix("]"))


@lru_cache(maxsize=64)
def _tasks(text: str) -> frozenset[int]:
    try:
        return frozenset(parse_array(text))
    except ValueError:
        return frozenset()  # cut short: unknown


def unreadable_end(job_id: str, error: UnreadableError) -> JobFacts:
    """A job that squeue has forgotten, and whose end is unknown."""
    return JobFacts(job_id, "", reason=f"squeue knows the job no more, and {error.message}", source="none")


def outlived(facts: JobFacts) -> JobFacts:
    """What accounting says of a job that the queue has forgotten: an end is an end, anything else lags behind."""
    if run_state(facts.state).final:
        return facts
    return replace(facts, state="", reason=f"accounting says {facts.state}, but squeue knows the job no more")

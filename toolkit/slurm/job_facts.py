"""Parse facts about jobs from squeue and sacct, so that a job name, a comment or a damaged line cannot look like a state."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from toolkit.rundir.states import RunState
from toolkit.slurm.array import parse_array
from toolkit.slurm.records import UnreadableError, read_records

__all__ = ["JobFacts", "base_of", "base_state", "run_state"]

# Fields of squeue --Format and of sacct --format, in the order of the columns.
_QUEUE = (
    "JobArrayID", "State", "Reason", "NodeList", "TimeLeft", "StartTime", "EligibleTime", "RestartCnt", "Comment",
    "Partition", "NumNodes", "TimeLimit", "EndTime", "Dependency", "ReqNodes", "JobArrayID",
)  # fmt: skip
_ACCOUNTS = ("JobID", "State", "ExitCode", "NodeList", "Submit", "JobID")
# squeue may print `5_*` for all pending tasks of array 5.
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+|_\[[0-9,:%-]+\]|_\*)?(\+[0-9]+)?", re.ASCII)
_CANCELLED_BY = re.compile(r"CANCELLED by ([0-9]+)", re.ASCII)


@dataclass(frozen=True)
class JobFacts:
    """The facts about one job or array task (`123_4`). "" and None mean that Slurm reports no value.

    `state` is the name that Slurm prints. Times are local times such as `2026-11-21T02:48:01`; for a pending job,
    `start_time` is an estimate. `restarts` is the number of requeues. `cancelled_by` is a user id, only from sacct; the
    fields from `partition` to `required_nodes` are only from squeue. `cluster` is the cluster of the query.
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
    """Return the squeue command for jobs in any state and partition; `jobs` are ids without task numbers."""
    form = ",".join(f"{name}:{mark}" for name in _QUEUE)
    return ["squeue", "--noheader", "--all", "--states=all", f"--Format={form}", "--jobs=" + ",".join(jobs)]


def sacct_argv(jobs: Iterable[str], mark: str) -> list[str]:
    """Return the sacct command for jobs without their steps."""
    return ["sacct", "--noheader", "--parsable", f"--delimiter={mark}", "--allocations",
            "--format=" + ",".join(_ACCOUNTS), "--jobs=" + ",".join(jobs)]  # fmt: skip


def read_squeue(text: str, mark: str) -> list[JobFacts]:
    """Parse the output of `squeue_argv`; UnreadableError if it contains anything else."""
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
    """Parse the output of `sacct_argv`; of a requeued job, only the last execution. Errors as in `read_squeue`."""
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
    """Return the job number that squeue and sacct accept: `123` for `123_4`, `123_[5-9%2]` and `123+1`."""
    return re.split(r"[_+]", job_id, maxsplit=1)[0]


def of_jobs(rows: Iterable[JobFacts], wanted: Collection[str]) -> dict[str, JobFacts]:
    """Return the facts about the wanted jobs; pending tasks of an array may share one row (`123_[5-9%2]`).

    A whole array or heterogeneous job has the facts of one part: a running one, else a pending one, else the last one.
    """
    facts: dict[str, JobFacts] = {}
    parts: dict[str, list[JobFacts]] = {}
    for row in rows:
        facts.setdefault(row.job_id, row)
        parts.setdefault(base_of(row.job_id), []).append(row)
    for job_id in wanted:
        base, _, task = job_id.partition("_")
        if job_id in facts or base not in parts:
            continue
        if not task:
            facts[job_id] = replace(min(parts[base], key=_nearness_to_end), job_id=job_id)
        for part in parts[base]:
            if task and _holds(part.job_id, int(task)):
                facts[job_id] = replace(part, job_id=job_id)
    return {job_id: facts[job_id] for job_id in wanted if job_id in facts}


def _nearness_to_end(part: JobFacts) -> tuple[int, int]:
    """Return a sort key for the parts of a job: a running one first, then a pending one, then the last ended one."""
    state, number = run_state(part.state), part.job_id.partition("_")[2]
    return 2 if state.final else int(state is RunState.PENDING), -int(number) if _is_number(number) else 0


def _holds(job_id: str, task: int) -> bool:
    """Return whether a row `123_[5-9%2]` or `123_*` includes a task."""
    if job_id.endswith("_*"):
        return True  # this row represents every task without a row of its own
    _, bracket, tasks = job_id.partition("_[")
    return bool(bracket) and task in _tasks(tasks.removesuffix("]"))


@lru_cache(maxsize=64)
def _tasks(text: str) -> frozenset[int]:
    try:
        return frozenset(parse_array(text))
    except ValueError:
        return frozenset()  # Slurm truncated the list, so the tasks are unknown


def unreadable_end(job_id: str, error: UnreadableError) -> JobFacts:
    """Return the facts about a job that squeue no longer lists, and whose final state is unknown."""
    return JobFacts(job_id, "", reason=f"squeue no longer lists the job, and {error.message}", source="none")


def outlived(facts: JobFacts) -> JobFacts:
    """Return the sacct facts about a job that left the queue, without the state if it is outdated (not final)."""
    if run_state(facts.state).final:
        return facts
    return replace(facts, state="", reason=f"accounting reports {facts.state}, but squeue no longer lists the job")


# Source: slurm.schedmd.com/squeue.html and sacct.html, "JOB STATE CODES", Slurm 22.05 to 26.05.
STATES: dict[str, RunState] = {
    "PENDING": RunState.PENDING,
    "CONFIGURING": RunState.PENDING,
    "EXPEDITING": RunState.PENDING,
    "REQUEUED": RunState.PENDING,
    "REQUEUE_FED": RunState.PENDING,
    "REQUEUE_HOLD": RunState.PENDING,
    "RESV_DEL_HOLD": RunState.PENDING,
    "SPECIAL_EXIT": RunState.PENDING,
    "RUNNING": RunState.RUNNING,
    "COMPLETING": RunState.RUNNING,
    "SIGNALING": RunState.RUNNING,
    "STAGE_OUT": RunState.RUNNING,
    "STOPPED": RunState.RUNNING,
    "SUSPENDED": RunState.RUNNING,
    "RESIZING": RunState.RUNNING,
    "COMPLETED": RunState.COMPLETED,
    "CANCELLED": RunState.CANCELLED,
    "FAILED": RunState.FAILED,
    "BOOT_FAIL": RunState.FAILED,
    "LAUNCH_FAILED": RunState.FAILED,
    "RECONFIG_FAIL": RunState.FAILED,
    "NODE_FAIL": RunState.FAILED,
    "OUT_OF_MEMORY": RunState.FAILED,
    "REVOKED": RunState.FAILED,
    "TIMEOUT": RunState.TIMEOUT,
    "DEADLINE": RunState.TIMEOUT,
    "PREEMPTED": RunState.PREEMPTED,
}


def base_state(text: str) -> str:
    """Return a state without its details: CANCELLED for `CANCELLED by 1000` and `CANCELLED+`."""
    words = text.split()
    return words[0].rstrip("+").upper() if words else ""


def run_state(slurm_state: str) -> RunState:
    """Return the run state for a Slurm state; UNKNOWN if the Slurm manual does not list it."""
    return STATES.get(base_state(slurm_state), RunState.UNKNOWN)

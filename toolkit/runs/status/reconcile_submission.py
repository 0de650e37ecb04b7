"""Find the job of an interrupted submission by the token that was recorded before the call of sbatch."""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.errors import NotFoundError, SchedulerRefusedError, ToolkitError
from toolkit.rundir.claims import Part, parts_in, process_start_ticks, read_claim, slurm_id, write_submission
from toolkit.rundir.files import read_json_or_none, write_json
from toolkit.rundir.find import array_in, newest_record
from toolkit.rundir.layout import RunDirectory, start_of
from toolkit.slurm.array import parse_array
from toolkit.slurm.commands import Slurm
from toolkit.slurm.submit import PATIENCE_S, SETTLE_S, find_by_token, token_of

__all__ = ["array_of_first_start", "close_submission", "tasks_in"]


@dataclass(frozen=True)
class OpenSubmission:
    """A start whose sbatch call has not responded. If `certain`, it has no job, and none will appear."""

    start: int
    certain: bool
    reason: str


def close_submission(run: RunDirectory, start: int, job_id: str, parts: Sequence[Part] = ()) -> None:
    """Record the job of a start, also for the tasks that it restarts.

    `parts` are the Slurm arrays of a run that was split into several.
    """
    again = tasks_in(newest_record(run)) if run.task_numbers() else ()
    for task in run.task_numbers():
        if task in again:
            write_submission(run.task(task), start, slurm_id(parts, job_id, task))
    write_submission(run, start, job_id, parts)
    if start:
        run.revived_marker.touch(mode=0o600)
    run.submitting(start).unlink(missing_ok=True)


def tasks_in(record: Path) -> frozenset[int]:
    """Return the tasks of an array from `record.json` or `resumed-SSS.json`.

    Raises:
        ToolkitError: the file is damaged.
    """
    return _parsed(array_in(record), record)


def array_of_first_start(run: RunDirectory) -> str:
    """Return the tasks of the first start of a run; of the repeated run if this one repeats a single task of it.

    Raises:
        ToolkitError: the record is damaged.
    """
    array = str((read_json_or_none(run.record) or {}).get("whole_array") or array_in(run.record))
    _parsed(array, run.record)
    return array


def _parsed(array: str, record: Path) -> frozenset[int]:
    try:
        return frozenset(parse_array(array)) if array else frozenset()
    except ValueError as error:
        raise ToolkitError(
            f"the record is damaged: {error}", where=f"{record}:job.array", fix="submit the job again"
        ) from error


def last_open_start(run: RunDirectory) -> int | None:
    """Return the start whose submission has no result yet; None if a later start was submitted, or none is open."""
    opened = max(_numbers(run, "submitting"), default=-1)
    return opened if opened > max(_numbers(run, "submitted"), default=-1) else None


def settle(run: RunDirectory, slurm: Slurm) -> OpenSubmission | None:
    """Query Slurm for the job of an interrupted submission, and record it if found; None if none is open any more."""
    start = last_open_start(run)
    if start is None:
        return None
    path = run.submitting(start)
    record = read_json_or_none(path)
    if record is None:
        return None  # another process has just recorded the job
    claim = read_claim(run, start)
    try:
        job_id = claim.job_id if claim is not None else find_by_token(slurm, record["token"])
    except (SchedulerRefusedError, NotFoundError) as error:
        if record.pop("absent_since", None) is not None:
            write_json(path, record)
        reason = f"cannot determine whether Slurm accepted start {start}: {error.message}"
        return OpenSubmission(start, False, reason)
    if job_id is not None and _is_under_way(record) and record.get("parts"):
        return OpenSubmission(start, False, f"start {start} is being submitted in {len(record['parts'])} parts")
    if job_id is not None:
        close_submission(run, start, job_id, _found_parts(run, start, parts_in(record), job_id, slurm))
        return None
    if _is_under_way(record):
        doing = f"start {start} is being submitted by process {record['pid']} on {record['host']}"
        return OpenSubmission(start, False, doing)
    broken = f"the submission of start {start} was interrupted, and Slurm has no job with comment {record['token']}"
    since = record.get("absent_since")
    if since is None:  # a slurmctld that has just resumed may still be about to process the request
        write_json(path, {**record, "absent_since": time.time()})
    if since is None or time.time() - since < SETTLE_S:
        return OpenSubmission(start, False, f"{broken} yet; retry after {SETTLE_S:.0f} s")
    return OpenSubmission(start, True, broken)


def _found_parts(run: RunDirectory, start: int, planned: Sequence[Part], first_job: str, slurm: Slurm) -> list[Part]:
    """Return the parts of an array that Slurm accepted before the interruption; other tasks are lost."""
    tokens = (token_of(run.run_id, start, number) for number in range(1, len(planned)))
    found = [first_job, *(find_by_token(slurm, token) for token in tokens)]
    return (
        [replace(part, job_id=job_id) for part, job_id in zip(planned, found, strict=True) if job_id] if planned else []
    )


def was_given_by_hand(run: RunDirectory, slurm: Slurm) -> bool:
    """Record the job of a rendered script that the user submitted with sbatch; return whether it is in the queue."""
    try:
        job_id = find_by_token(slurm, token_of(run.run_id, 0))
    except (SchedulerRefusedError, NotFoundError):
        return False
    if job_id is not None:
        close_submission(run, 0, job_id)
    return job_id is not None


def _is_under_way(record: dict[str, Any]) -> bool:
    if record["host"] == socket.gethostname():
        try:
            return process_start_ticks(record["pid"]) == record["process_started"]
        except ProcessLookupError:
            return False
    age = datetime.now(UTC) - datetime.fromisoformat(record["time"])
    return age.total_seconds() < 2 * PATIENCE_S  # assume so for a while, because its host is another one


def _numbers(run: RunDirectory, word: str) -> list[int]:
    return [start_of(path) for path in run.path.glob(f"{word}-*.json")]

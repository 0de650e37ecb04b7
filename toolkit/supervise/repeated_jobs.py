"""Repeated jobs: an array that runs one task at a time, where each task is a start of the same run.

On sites without requeue, this is how a run continues past its walltime. The job that ends the run cancels the pending
jobs. A job that starts anyway finds the final record of the run, and exits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.claims import read_claim
from toolkit.rundir.files import utc_now, write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.slurm.commands import Slurm
from toolkit.supervise.allocation import ANSWER_S, Allocation
from toolkit.supervise.log import say


@dataclass(frozen=True)
class Turn:
    """One of `count` repeated jobs; `number` counts them from 1. `array_job` is the id of their array."""

    number: int
    count: int
    array_job: str

    @property
    def is_last(self) -> bool:
        return self.number >= self.count

    def why_last(self, run_id: str) -> str:
        """Return why no other start follows the last job, and how to continue."""
        return f"this was the last of {self.count} repeated jobs; `toolkit resume {run_id}` submits {self.count} more"


def take_turn(job: Mapping[str, Any], allocation: Allocation) -> Turn | None:
    """Return which repeated job this is, or None. Clears `allocation.task`: repeated jobs share the run directory."""
    count = int(job["job"].get("repeat") or 1)
    if count < 2 or allocation.task is None:
        return None
    turn = Turn(allocation.task, count, allocation.job_id.partition("_")[0])
    allocation.task = None
    return turn


def end_since(run: RunDirectory, first: int) -> AttemptRecord | None:
    """Return the end of a run or task that ended in start `first` or a later one; None if it did not."""
    attempt = run.last_attempt()
    end = AttemptRecord.read(attempt) if attempt is not None else None
    begun = StartRecord.read(attempt) if attempt is not None else None
    if end is None or begun is None or not end.final or begun.start < first:
        return None
    return end


def start_of_turn(run: RunDirectory, first: int, job_id: str) -> int:
    """Return the number of the start that this job may claim: the one that it has claimed already, else the next one.

    Slurm starts a repeated job only after the previous one has ended. If the supervisor of the previous job left no
    record, it was killed, and this function closes its start.
    """
    numbers = run.start_numbers()
    for number in numbers:
        claim = read_claim(run, number)
        if claim is not None and claim.job_id == job_id:
            return number
        folder = run.start(number)
        if not any((folder / name).exists() for name in ("end.json", "lost.json")):
            write_json(folder / "lost.json", {"time": utc_now(), "note": f"closed by the next repeated job, {job_id}"})
    return max([first - 1, *numbers]) + 1


def cancel_later_turns(turn: Turn) -> None:
    """Cancel the repeated jobs that are still pending."""
    if turn.is_last:
        return
    say(f"the run has ended; cancelling the {turn.count - turn.number} remaining repeated jobs")
    try:
        Slurm(timeout_s=ANSWER_S).call(["scancel", "--state=PENDING", turn.array_job])
    except (NotFoundError, SchedulerRefusedError) as error:
        say(f"cannot cancel the remaining jobs: {error.message}; each one will exit as soon as it starts")

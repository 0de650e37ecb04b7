"""Repeated jobs: an array that runs one task at a time, where each task is a start of the same run.

On sites without requeue, a run continues this way past its walltime. The job that ends the run cancels the pending jobs;
one that starts anyway finds the run's final record, and exits.
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
    """Job `number` of `count`, counted from 1, of the array `array_job`."""

    number: int
    count: int
    array_job: str

    @property
    def is_last(self) -> bool:
        return self.number >= self.count

    def why_last(self, run_id: str) -> str:
        """Why no other start follows the last job, and how to continue."""
        return f"this was the last of {self.count} repeated jobs; `toolkit resume {run_id}` submits {self.count} more"


def take_turn(job: Mapping[str, Any], allocation: Allocation) -> Turn | None:
    """This job's turn, or None. Afterwards the job counts as no array task: all turns share the run's own folder."""
    count = int(job["job"].get("repeat") or 1)
    if count < 2 or allocation.task is None:
        return None
    turn = Turn(allocation.task, count, allocation.job_id.partition("_")[0])
    allocation.task = None
    return turn


def code_of_ended_run(run: RunDirectory, first: int) -> int | None:
    """The exit code of a run that has ended since its start `first`; None if it is to continue."""
    attempt = run.last_attempt()
    end = AttemptRecord.read(attempt) if attempt is not None else None
    begun = StartRecord.read(attempt) if attempt is not None else None
    if end is None or begun is None or not end.final or begun.start < first:
        return None
    return end.exit_code


def start_of_turn(run: RunDirectory, first: int, job_id: str) -> int:
    """The number of the start that this job may claim: the one that it has, else the next one.

    Slurm starts a job of the array when the one before it is over. If that one's supervisor left no record, it was
    killed, and its start is closed here.
    """
    numbers = run.start_numbers()
    for number in numbers:
        claim = read_claim(run, number)
        if claim is not None and claim.job_id == job_id:
            return number
        folder = run.start(number)
        if not any((folder / name).exists() for name in ("end.json", "lost.json")):
            write_json(
                folder / "lost.json", {"time": utc_now(), "note": f"closed by job {job_id}, whose turn came next"}
            )
    return max([first - 1, *numbers]) + 1


def cancel_later_turns(turn: Turn) -> None:
    """Cancel the jobs that are still pending."""
    if turn.is_last:
        return
    say(f"the run has ended; cancelling the {turn.count - turn.number} remaining repeated jobs")
    try:
        Slurm(timeout_s=ANSWER_S).call(["scancel", "--state=PENDING", turn.array_job])
    except (NotFoundError, SchedulerRefusedError) as error:
        say(f"cannot cancel the remaining jobs: {error.message}; each exits as soon as it starts")

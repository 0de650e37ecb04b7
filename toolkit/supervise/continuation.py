"""Continue a run after a start has ended, by a requeue or a follow-up job. Also record an end for attempts whose
supervisor was killed."""

import os
import re
import time
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path

from toolkit.errors import OWN_FAILURE, OwnFailureError, SchedulerRefusedError, ToolkitError
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.claims import open_submission, process_start_ticks, write_submission
from toolkit.rundir.files import read_lines, utc_now, write_text
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.states import ENDINGS, NEXT_START_BEGAN, Cause, Next
from toolkit.slurm.commands import Slurm
from toolkit.slurm.submit import UnsettledError, comment_of, is_unsettled, submit_once, token_of
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.log import say
from toolkit.supervise.progress import last_step
from toolkit.supervise.requests import StopRequest

PATIENCE_S = 300.0  # time for Slurm to accept a requeue, and again to end this job
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_REQUEUED_BEFORE = "Job is pending execution"  # ESLURM_JOB_PENDING: the job is already in the queue
# A follow-up job is submitted on a node of its own cluster, and --clusters fails without an accounting database.
_CLUSTER_LINE = re.compile(r"^#SBATCH --clusters=.*\n", re.MULTILINE)
_START_LINE = re.compile(r"^export TOOLKIT_START=\d+$", re.MULTILINE)


def await_end(request: StopRequest) -> bool:
    """Wait for Slurm to end this job; return True as soon as SIGTERM arrives, so that the job exits before SIGKILL."""
    return _ended_within(PATIENCE_S, request)


def requeue(allocation: Allocation, request: StopRequest, *, exclude: str = "") -> None:
    """Requeue this job, or only this task of an array, and wait until Slurm ends it.

    `exclude` is a host list of nodes that Slurm must not allocate to the job again.

    Raises:
        SchedulerRefusedError, NotFoundError: Slurm rejected the requeue, or did not respond for `PATIENCE_S`.
        OwnFailureError: Slurm accepted the requeue but did not perform it.
    """
    _ask_for_requeue(allocation.job_id, request)
    if exclude:
        _exclude(allocation, exclude)
    if not await_end(request):
        raise OwnFailureError(f"Slurm accepted the requeue but did not perform it within {PATIENCE_S:.0f} s")


def _ask_for_requeue(job_id: str, request: StopRequest) -> None:
    """Repeat the requeue request until Slurm responds or ends this job: slurmctld may be restarting.

    Slurm does not enforce time limits while slurmctld is down, so the remaining time does not matter here.
    """
    deadline = time.monotonic() + PATIENCE_S
    is_repeated = False
    for pause_s in chain(_PAUSES_S, repeat(_PAUSES_S[-1])):
        try:
            Slurm().requeue(job_id)
            return
        except SchedulerRefusedError as error:
            if is_repeated and _REQUEUED_BEFORE in error.message:
                return
            if not is_unsettled(error) or time.monotonic() + pause_s > deadline:
                raise
            say(f"{error.message}; retrying the requeue in {pause_s:.0f} s")
        is_repeated = True
        if _ended_within(pause_s, request):
            return  # Slurm has requeued the job, or a user cancelled it, which must not be undone


def _ended_within(seconds: float, request: StopRequest) -> bool:
    """Wait for `seconds`; return True as soon as Slurm sends SIGTERM."""
    deadline = time.monotonic() + seconds
    while not request.terminated and time.monotonic() < deadline:
        time.sleep(0.2)
    return request.terminated


def _exclude(allocation: Allocation, nodes: str) -> None:
    """Exclude nodes from a requeued, pending job. Retry once: the requeue's SIGTERM may kill the first scontrol."""
    for last in (False, True):
        try:
            Slurm().call(["scontrol", "update", f"JobId={allocation.job_id}", f"ExcNodeList={nodes}"])
            return
        except SchedulerRefusedError as error:
            if last:
                say(f"cannot exclude {nodes}, so Slurm may allocate them to this job again: {error.message}")


def submit_follow_up(
    run: RunDirectory, allocation: Allocation, script: Path, start: int, *, exclude: str = "", given: Sequence[str] = ()
) -> str:
    """Submit the next start of the run as a job that starts after this one has ended; return its job id.

    `exclude` is a host list of nodes that Slurm must not allocate to it. `given` are the job's own sbatch options,
    whose --comment is appended to toolkit's.

    Raises:
        SchedulerRefusedError, NotFoundError: sbatch rejects it.
    """
    following = _script_of(run, script, start)
    options = [f"--dependency=afterany:{allocation.job_id}"]
    if exclude:
        options.append(f"--exclude={exclude}")
    arguments: list[str] = []
    if allocation.task is not None:
        number = int(allocation.job_id.partition("_")[2])
        options.append(f"--array={number}")
        arguments.append(str(allocation.task - number))  # the task of the run that has index 0 in this array
    token = token_of(run.run_id, start)
    opened = open_submission(run, start, token, process_started=process_start_ticks(os.getpid()))
    try:
        comment = comment_of(token, given)
        job_id = submit_once(Slurm(), following, comment, options=options, arguments=arguments, say=say)
    except UnsettledError:
        raise  # the job may be in the queue nevertheless; `toolkit status` searches for it
    except ToolkitError:
        opened.unlink()
        raise
    write_submission(run, start, job_id)
    opened.unlink()
    say(f"job {job_id} will start after this job has ended")
    return job_id


def _script_of(run: RunDirectory, script: Path, start: int) -> Path:
    """Write the script of a later start: this one with another start number and without --clusters; return its path."""
    text, replaced = _START_LINE.subn(f"export TOOLKIT_START={start}", script.read_text(encoding="utf-8"), count=1)
    if not replaced:
        raise OwnFailureError("expected a line `export TOOLKIT_START=N` in the script, got none", where=str(script))
    write_text(run.script(start), _CLUSTER_LINE.sub("", text, count=1), mode=0o700)
    return run.script(start)


def close_unfinished(run: RunDirectory) -> None:
    """Record an end for each attempt of an earlier start whose supervisor was killed.

    The cause is that of the last stop request to the ranks, or the loss of the supervisor if there was none.
    """
    for attempt in map(run.attempt, run.attempt_numbers()):
        if not attempt.exit_file.exists():
            cause = _asked_last(attempt) or Cause.SUPERVISOR_LOST
            reason = "its supervisor was killed before it recorded the end of this attempt"
            AttemptRecord(
                cause, Next.AWAIT, False, ENDINGS[cause].final_state, OWN_FAILURE, reason, NEXT_START_BEGAN,
                step=last_step(attempt), seconds=0.0, time=utc_now(),
            ).write(attempt)  # fmt: skip


def _asked_last(attempt: AttemptDirectory) -> Cause | None:
    requests = [record for record in read_lines(attempt.events) if record["event"] == "stop_requested"]
    return Cause(requests[-1]["cause"]) if requests else None

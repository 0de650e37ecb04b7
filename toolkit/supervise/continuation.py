"""How a run continues after a start has ended: a requeue by Slurm or by toolkit, or a follow-up job. Also closes the
starts whose supervisor was killed before it recorded an end."""

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

PATIENCE_S = 300.0  # for Slurm's answer to a requeue, and again until Slurm ends this job
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_REQUEUED_BEFORE = "Job is pending execution"  # ESLURM_JOB_PENDING, the job is in the queue already
# The next job is submitted on a node of this one's cluster, where Slurm may have no accounting database that lists other clusters.
_CLUSTER_LINE = re.compile(r"^#SBATCH --clusters=.*\n", re.MULTILINE)
_START_LINE = re.compile(r"^export TOOLKIT_START=\d+$", re.MULTILINE)


def await_end(request: StopRequest) -> bool:
    """Wait for Slurm to end this job; True as soon as TERM arrives, so that the nodes are released before Slurm's KILL."""
    return _ended_within(PATIENCE_S, request)


def requeue(allocation: Allocation, request: StopRequest, *, exclude: str = "") -> None:
    """Have Slurm put this job, or this one task of an array, back into the queue, and wait until Slurm ends it.

    `exclude` is a host list of nodes that the job must not get again.

    Raises:
        SchedulerRefusedError, NotFoundError: Slurm refused, or has not answered for `PATIENCE_S`.
        OwnFailureError: Slurm accepted the requeue but did not perform it.
    """
    _ask_for_requeue(allocation.job_id, request)
    if exclude:
        _exclude(allocation, exclude)
    if not await_end(request):
        raise OwnFailureError(f"Slurm accepted the requeue but did not perform it within {PATIENCE_S:.0f} s")


def _ask_for_requeue(job_id: str, request: StopRequest) -> None:
    """Request the requeue until Slurm answers, since slurmctld may be restarting, or until Slurm ends this job.

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
            return  # because of a requeue whose answer was lost, or of a cancel, which must not be undone


def _ended_within(seconds: float, request: StopRequest) -> bool:
    """Wait; True as soon as Slurm sends TERM."""
    deadline = time.monotonic() + seconds
    while not request.terminated and time.monotonic() < deadline:
        time.sleep(0.2)
    return request.terminated


def _exclude(allocation: Allocation, nodes: str) -> None:
    """Exclude nodes; only a pending job accepts this. The requeue's TERM may end the first scontrol, so it is repeated."""
    for last in (False, True):
        try:
            Slurm().call(["scontrol", "update", f"JobId={allocation.job_id}", f"ExcNodeList={nodes}"])
            return
        except SchedulerRefusedError as error:
            if last:
                say(f"Slurm may allocate {nodes} to this job again: {error.message}")


def submit_follow_up(
    run: RunDirectory, allocation: Allocation, script: Path, start: int, *, exclude: str = "", given: Sequence[str] = ()
) -> str:
    """Submit the run's next start as a job that starts after this one has ended; return its job id.

    `exclude` is a host list of nodes that it must not get; `given` are the job's own sbatch options, whose comment
    is appended to toolkit's.

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
        arguments.append(str(allocation.task - number))  # the first task of this part of the array
    token = token_of(run.run_id, start)
    opened = open_submission(run, start, token, process_started=process_start_ticks(os.getpid()))
    try:
        comment = comment_of(token, given)
        job_id = submit_once(Slurm(), following, comment, options=options, arguments=arguments, say=say)
    except UnsettledError:
        raise  # the job may be in the queue; `toolkit status` searches for it
    except ToolkitError:
        opened.unlink()
        raise
    write_submission(run, start, job_id)
    opened.unlink()
    say(f"job {job_id} will start after this one has ended")
    return job_id


def _script_of(run: RunDirectory, script: Path, start: int) -> Path:
    """Write the script of a later start: this start's script with another number and without the cluster's name."""
    text, replaced = _START_LINE.subn(f"export TOOLKIT_START={start}", script.read_text(encoding="utf-8"), count=1)
    if not replaced:
        raise OwnFailureError("the script does not contain its start number", where=str(script))
    write_text(run.script(start), _CLUSTER_LINE.sub("", text, count=1), mode=0o700)
    return run.script(start)


def close_unfinished(run: RunDirectory) -> None:
    """Record an end for each attempt of an earlier start whose supervisor was killed.

    The last request to the ranks is the cause; without any request the cause is the lost supervisor itself.
    """
    for attempt in map(run.attempt, run.attempt_numbers()):
        if not attempt.exit_file.exists():
            cause = _asked_last(attempt) or Cause.SUPERVISOR_LOST
            reason = "its supervisor was killed before it could record its end"
            AttemptRecord(
                cause, Next.AWAIT, False, ENDINGS[cause].final_state, OWN_FAILURE, reason, NEXT_START_BEGAN,
                step=last_step(attempt), seconds=0.0, time=utc_now(),
            ).write(attempt)  # fmt: skip


def _asked_last(attempt: AttemptDirectory) -> Cause | None:
    requests = [record for record in read_lines(attempt.events) if record["event"] == "stop_requested"]
    return Cause(requests[-1]["cause"]) if requests else None

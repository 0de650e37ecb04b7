"""Run one start of a run in an allocation: find its number, claim it, and run its supervisor to the end."""

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from toolkit.errors import NotFoundError, OwnFailureError, counted
from toolkit.rundir.claims import SupersededError, claim_start, process_start_ticks
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import RunDirectory, make_task
from toolkit.rundir.states import Cause, RunState
from toolkit.rundir.sweep import in_words, values_of_task
from toolkit.slurm.batch_script import shell_signal
from toolkit.slurm.times import parse_slurm_time
from toolkit.supervise.allocation import Allocation, drop_memory, find_allocation, stop_grace_s
from toolkit.supervise.continuation import close_unfinished
from toolkit.supervise.log import say
from toolkit.supervise.repeated_jobs import cancel_later_turns, end_since, start_of_turn, take_turn
from toolkit.supervise.requests import StopRequest
from toolkit.supervise.shape import check_components, shape_of_job
from toolkit.supervise.staging import unstage, unstage_here
from toolkit.supervise.supervisor import Supervisor


def supervise(run: RunDirectory, job: Mapping[str, Any], *, first_start: int) -> int:
    """Run one start of a run, or of one task of an array run; return the job's exit code."""
    if not run.starts.is_dir():  # since 23.02, Slurm creates the folder of the log
        raise NotFoundError("the run directory does not exist", where=str(run.path), fix="submit the job again")
    request = StopRequest()
    request.hear_signals()  # before the claim, since the default action of a signal leaves no record
    asked = shape_of_job(job)
    own = shell_signal(job["job"]["sbatch"]) if asked.is_once else None
    request.is_for_script = own is not None and not job["restart"]["walltimes"]
    allocation = find_allocation(os.environ, asked.nodes)
    check_components(asked, allocation)
    if allocation.of_components and not asked.is_once:
        drop_memory(os.environ)
    job = job_of_task(job, allocation.task)
    if not allocation.in_slurm:
        _limit_local_run(allocation, job, request)
    script = run.script(first_start)
    turn, first = take_turn(job, allocation), first_start
    if turn is not None:
        say(f"repeated job {turn.number} of {turn.count}")
        if (end := end_since(run, first_start)) is not None:
            say("the run has ended; nothing to do")
            cancel_later_turns(turn)
            return end.exit_code
        first = start_of_turn(run, first_start, allocation.job_id)
    if allocation.task is not None:
        run = make_task(run, allocation.task)
        script = run.script(first_start) if run.script(first_start).exists() else script
    # Slurm may start again what has ended: `scontrol requeue ARRAYJOB` all tasks of an array, a handler of SIGUSR1 a stopped
    # run. Only a resume continues or repeats it.
    over = (RunState.STOPPED,) if allocation.task is None else (RunState.STOPPED, RunState.COMPLETED)
    if (end := end_since(run, first_start)) is not None and end.state in over:
        say(f"{run.run_id} has ended ({end.state}), so there is nothing to do; `toolkit resume` starts it again")
        return end.exit_code
    claim = claim_start(
        run, first=first, job_id=allocation.job_id, host=socket.gethostname(), pid=os.getpid(),
        process_started=process_start_ticks(os.getpid()),
    )  # fmt: skip
    shape = shape_of_job(job, allocation.nodes)
    supervisor = Supervisor(run, job, claim.start, allocation, shape, script, request, turn)
    request.may_be_early = supervisor.may_be_early
    size = f"{counted(shape.ranks, 'rank')} on {counted(shape.nodes, 'node')}"
    say(f"run {run.run_id}, start {claim.start}, job {allocation.job_id}: {size}")
    if values := values_of_task(run):
        say(f"task {allocation.task} has {in_words(values)}")
    try:
        write_json(run.start(claim.start) / "job.json", job)
        close_unfinished(run)
        supervisor.stop_grace_s = stop_grace_s(allocation)
        return supervisor.run_start()
    except SupersededError:
        if supervisor.staged is not None:
            unstage_here(supervisor.staged)
        raise
    except Exception as error:
        supervisor.fail(error)
        if supervisor.staged is not None:
            unstage(supervisor.staged, allocation, os.environ)
        raise


def _limit_local_run(allocation: Allocation, job: Mapping[str, Any], request: StopRequest) -> None:
    """End a run without Slurm at `job.time`, with the warning that Slurm would send before it."""
    limit_s = parse_slurm_time(str(job["job"].get("time") or "0"))
    if not limit_s:
        return
    allocation.ends_at = time.time() + limit_s
    restart, is_script = job["restart"], bool(job["job"].get("once"))
    has_warning = not is_script or restart["walltimes"] != 0 or "restart.warn_s" in job.get("origins", {})
    timers = []
    if has_warning:
        after_s = max(0.0, limit_s - float(restart["warn_s"]))
        timers.append(threading.Timer(after_s, request.on_signal, (signal.SIGUSR2, None)))
    if is_script:  # its warning requests nothing of toolkit
        timers.append(threading.Timer(limit_s, request.ask, (Cause.WALLTIME,)))
    for timer in timers:
        timer.daemon = True
        timer.start()


def job_of_task(job: Mapping[str, Any], task: int | None) -> Mapping[str, Any]:
    """Return the job with the sweep values of this task applied. A job without a sweep is returned unchanged.

    Raises:
        OwnFailureError: the sweep does not contain this task.
    """
    if "sweep" not in job:
        return job
    values = job["sweep"].get(str(task))
    if values is None:
        raise OwnFailureError(
            f"the script contains the sweep values of {len(job['sweep'])} tasks, but not of task {task}",
            fix="submit the script unchanged, with its own --array",
        )
    own = {name: table for name, table in job.items() if name != "sweep"}
    for key, value in values.items():
        table, _, name = key.partition(".")
        own[table] = {**own[table], name: value} if name else value
    return own

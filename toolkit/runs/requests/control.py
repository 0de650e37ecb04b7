"""Request a save, a stop or a requeue from a running run, and record requeues."""

import time

from toolkit.errors import CheckFailedError
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.claims import newest_parts
from toolkit.rundir.files import read_json_or_none, utc_now, write_text
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.states import Cause, RunState
from toolkit.rundir.user_requests import add_requeue, ask_to_stop, note_request, stop_within_s
from toolkit.runs.record.job import is_interactive, recorded_job, slurm_of, uses_slurm
from toolkit.runs.status.state import run_status
from toolkit.runs.status.state_table import RunStatus, state_phrase
from toolkit.slurm.batch_script import signal_in
from toolkit.supervise.launch import is_unmanaged
from toolkit.supervise.stacks import NO_STACKS

__all__ = ["ask_for", "request_stacks", "requeue_run", "require_running", "stop_run"]


REPLY_S = 30.0


def stop_run(run: RunDirectory, within_s: float | None = None) -> str:
    """Request that the ranks save and exit, or, if that was requested before, kill them; return what follows.

    Args:
        within_s: the time that the ranks have; by default that of a walltime, `restart.warn_s`, and at least a minute.

    Raises:
        CheckFailedError: the run is not running, or `within_s` would change an earlier request.
    """
    require_running(run, "so it cannot stop")
    asked = run.asked_file("stop")
    if asked is not None and within_s is not None:
        raise CheckFailedError(
            f"run {run.run_id} was asked to stop before: --within cannot change its time now",
            where=str(asked),
            fix=f"wait, or kill its ranks: `toolkit stop {run.run_id}`",
        )
    for part in run.with_tasks():
        note_request(part, "stop" if asked is None else "kill", "toolkit stop")
        if asked is None:
            ask_to_stop(part, within_s)
        else:
            write_text(part.control / "kill", utc_now() + "\n")
    return (
        _what_follows_a_stop(run)
        if asked is None
        else f"run {run.run_id} was asked to stop before: its ranks are killed"
    )


def ask_for(run: RunDirectory, request: str) -> RunStatus:
    """Write `control/save` or `control/stacks`; ranks read the former within 5 s and act at their next step boundary.

    Raises:
        CheckFailedError: the run is not running, or its ranks never check for saves.
    """
    status = require_running(run, f"so it cannot {request}")
    if request == "save" and _is_unmanaged(run) and not _reports_steps(run):
        raise CheckFailedError(
            f"run {run.run_id} cannot save on request: its program has not called toolkit.should_stop",
            where=str(run.path),
            fix="call toolkit.should_stop and toolkit.should_save in the script (docs/frameworks.md); the run accepts requests after its first step",
        )
    for part in run.with_tasks():
        note_request(part, request, f"toolkit {request}")
        write_text(part.control / request, utc_now() + "\n")
    return status


def request_stacks(run: RunDirectory) -> AttemptDirectory:
    """Make the supervisor collect the stacks of all ranks, wait for them, and return the attempt.

    Raises:
        CheckFailedError: the run is not running, or its supervisor does not respond.
    """
    require_running(run, "so it has no stacks")
    if recorded_job(run).job.once:
        raise CheckFailedError(
            f"{NO_STACKS}, and not what a batch script (job.once) starts", where=run.run_id,
            fix="run `py-spy dump` on the node, or start the program as the entry of a job (`toolkit import`)",
        )  # fmt: skip
    ask_for(run, "stacks")
    asked, deadline = run.control / "stacks", time.monotonic() + REPLY_S
    while (is_waiting := asked.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    asked.unlink(missing_ok=True)
    attempt = run.last_attempt()
    if is_waiting or attempt is None:
        raise CheckFailedError(
            f"the supervisor of run {run.run_id} has not collected stacks", where=str(asked),
            fix="name a task of an array, and check `toolkit logs`",
        )  # fmt: skip
    return attempt


def _what_follows_a_stop(run: RunDirectory) -> str:
    job = recorded_job(run)
    seconds = f"{stop_within_s(run, {'warn_s': job.restart.warn_s}):.0f} s"
    is_signalled = is_unmanaged(job.job.entry) and not _reports_steps(run)
    if is_signalled:
        found = signal_in(job.job.sbatch) if job.job.once else None
        own = found[0] if found is not None else job.job.signal
        signals = f"{own} now, TERM later" if own else "TERM now"
        first = f"run {run.run_id} receives {signals}, and KILL after {seconds}"
    else:
        first = f"run {run.run_id} saves at its next step boundary and ends; its ranks are killed after {seconds}"
    return (
        f"{first}, at the latest 10 s before its allocation ends (`toolkit stop {run.run_id}` again kills them now); "
        f"`toolkit resume {run.run_id}` {'starts it again' if is_signalled else 'continues it'}"
    )


def _is_unmanaged(run: RunDirectory) -> bool:
    return is_unmanaged(recorded_job(run).job.entry)


def _reports_steps(run: RunDirectory) -> bool:
    """Return whether a script uses `toolkit.world` like a training loop; `toolkit.step` alone saves nothing."""
    attempts = (part.last_attempt() for part in run.with_tasks())
    beats = (read_json_or_none(attempt.heartbeat) for attempt in attempts if attempt is not None)
    return any(beat is not None and beat.get("saves", True) for beat in beats)


def requeue_run(run: RunDirectory) -> RunStatus:
    """Make Slurm end the run's job and requeue it; ranks save first, within KillWait.

    For an array this applies to running tasks; waiting and ended ones do not change.

    Raises:
        CheckFailedError: the run is not running in a Slurm job.
        SchedulerRefusedError: Slurm does not requeue it.
    """
    status = require_running(run, "so there is nothing to requeue")
    job = recorded_job(run)
    if not uses_slurm(job) or status.job_id.startswith("local-"):
        raise CheckFailedError(
            f"run {run.run_id} is not a Slurm job: it runs on {job.site.name}",
            fix=f"`toolkit stop {run.run_id}`, then `toolkit resume {run.run_id}`",
        )
    if is_interactive(run):
        raise CheckFailedError(
            f"run {run.run_id} is not a queued job: it runs in allocation {status.job_id}",
            fix=f"`toolkit stop {run.run_id}`, then `toolkit resume {run.run_id}`",
        )
    if not job.job.requeue:
        raise CheckFailedError(
            f"run {run.run_id} may not be requeued: job.requeue is false",
            where=str(run.path),
            fix=f"`toolkit stop {run.run_id}`, then `toolkit resume {run.run_id}`",
        )
    asked_at = utc_now()
    for job_id in [part.job_id for part in newest_parts(run)] or [status.job_id]:
        slurm_of(job).requeue(job_id)
    for part in run.with_tasks():
        note_request(part, "requeue", "toolkit requeue")
        add_requeue(part, asked_at)
    after = run_status(run)
    if after.state.final:  # Slurm does not report array tasks that it did not requeue
        raise CheckFailedError(
            f"run {run.run_id} {state_phrase(after.state)} before Slurm could requeue it",
            where=str(run.path),
            fix=f"`toolkit resume {run.run_id}` starts it again",
        )
    return after


def requeue_asked_at(attempt: AttemptDirectory, end: AttemptRecord) -> str:
    """Return when `toolkit requeue` requested an attempt's end, which Slurm reports as a preemption; "" if it did not."""
    asked = attempt.run.control / "requeue"
    begun = StartRecord.read(attempt)
    if end.cause is not Cause.PREEMPTED or begun is None or not asked.exists():
        return ""
    times = asked.read_text(encoding="utf-8").split()
    return next((time for time in times if begun.time <= time <= end.time), "")


def require_running(run: RunDirectory, so: str) -> RunStatus:
    """Return the status of a running run, or raise CheckFailedError with the consequence `so`."""
    status = run_status(run)
    if status.state is not RunState.RUNNING:
        raise CheckFailedError(
            f"run {run.run_id} {state_phrase(status.state)}, {so}",
            where=str(run.path),
            fix=f"`toolkit cancel {run.run_id}` ends it"
            if status.state is RunState.PENDING
            else "`toolkit status --live` lists the active runs",
        )
    return status

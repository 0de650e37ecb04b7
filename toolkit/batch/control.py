"""Ask a living run for something: to save, to save and stop, or to go back into the queue."""

from __future__ import annotations

from toolkit.batch.state import RunStatus, run_status
from toolkit.batch.submission import is_interactive, recorded_job, slurm_of, uses_slurm
from toolkit.errors import CheckFailedError
from toolkit.rundir.files import utc_now, write_text
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState


def ask_for(run: RunDirectory, request: str) -> RunStatus:
    """Write `control/save` or `control/stop`; the ranks look within 5 s, and act at their next step boundary.

    Raises:
        CheckFailedError: the run is not running.
    """
    status = _require_running(run, f"so it cannot {request}")
    for part in (run, *map(run.task, run.task_numbers())):
        write_text(part.control / request, utc_now() + "\n")
    return status


def requeue_run(run: RunDirectory, *, echo: bool = False) -> RunStatus:
    """Have Slurm end the run's job and put it back into the queue; ranks save first, within KillWait.

    Of an array that holds for the tasks that run: those that wait or have ended stay as they are.

    Raises:
        CheckFailedError: the run is not running in a job of Slurm's, or no longer.
        SchedulerRefusedError: Slurm does not requeue it.
    """
    status = _require_running(run, "so there is nothing to requeue")
    job = recorded_job(run)
    if not uses_slurm(job) or status.job_id.startswith("local-"):
        raise CheckFailedError(
            f"run {run.run_id} is in no queue: it runs on {job.site.name}",
            fix=f"`toolkit stop {run.run_id}`, then `toolkit resume {run.run_id}`",
        )
    if is_interactive(run):
        raise CheckFailedError(
            f"run {run.run_id} is in no queue: it lives in the allocation {status.job_id}",
            fix=f"`toolkit stop {run.run_id}`, then `toolkit resume {run.run_id}`",
        )
    slurm_of(job, echo=echo).requeue(status.job_id)
    after = run_status(run)
    if after.state.final:  # Slurm says nothing of what it leaves alone
        raise CheckFailedError(
            f"run {run.run_id} is {after.state.value}: it ended before Slurm could requeue it",
            where=str(run.path),
            fix=f"`toolkit resume {run.run_id}` starts it again",
        )
    return after


def _require_running(run: RunDirectory, so: str) -> RunStatus:
    status = run_status(run)
    if status.state is not RunState.RUNNING:
        raise CheckFailedError(
            f"run {run.run_id} is {status.state.value}, {so}",
            where=str(run.path),
            fix="`toolkit status --live` shows which runs live",
        )
    return status

"""Cancel a run: say so in `control/`, and tell Slurm where it holds the job."""

from __future__ import annotations

from toolkit.batch.array_status import task_job_id
from toolkit.batch.state import RunStatus, newest_job_id, run_status
from toolkit.batch.submission import is_interactive, recorded_job, slurm_of
from toolkit.errors import CheckFailedError
from toolkit.rundir.files import utc_now, write_text
from toolkit.rundir.layout import RunDirectory, make_task
from toolkit.rundir.states import RunState


def cancel_run(run: RunDirectory, *, echo: bool = False) -> RunStatus:
    """Ask a whole run to end: ranks save at the next step boundary and leave.

    Raises:
        CheckFailedError: the run has already ended.
    """
    status = run_status(run)
    if status.state.final or status.state is RunState.CREATED:
        raise CheckFailedError(
            f"run {run.run_id} is {status.state.value}; there is nothing to cancel",
            where=str(run.path),
            fix="`toolkit history` shows which runs live",
        )
    living = {task.task for task in status.tasks or () if not task.state.final}
    for part in (run, *(run.task(number) for number in run.task_numbers() if number in living)):
        write_text(part.control / "cancel", utc_now() + "\n")
    # A local supervisor sees the file within a second. A signal could hit it before it hears signals, or, on
    # another host, hit another process. In somebody's allocation the run ends, not the allocation.
    if not status.job_id.startswith("local-") and not is_interactive(run):
        slurm_of(recorded_job(run), echo=echo).cancel([status.job_id])
    return run_status(run)


def cancel_task(run: RunDirectory, task: int, *, echo: bool = False) -> RunStatus:
    """Ask one task of an array run to end, also one that has not begun; the status is the whole run's.

    Raises:
        CheckFailedError: the task has already ended.
    """
    state = run_status(run.task(task)).state
    if state.final or state is RunState.CREATED:
        raise CheckFailedError(
            f"task {task} of run {run.run_id} is {state.value}; there is nothing to cancel",
            where=str(run.path),
            fix=f"`toolkit status {run.run_id}` shows which tasks live",
        )
    # Slurm forgets a task that it cancels in the queue at once; and one that begins this moment sees the file.
    write_text(make_task(run, task).control / "cancel", utc_now() + "\n")
    job_id = task_job_id(run, task, newest_job_id(run))
    slurm_of(recorded_job(run), echo=echo).cancel([job_id])
    return run_status(run)

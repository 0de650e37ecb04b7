"""Cancel a run: write the request to `control/`, and cancel its job in Slurm."""

from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.errors import CheckFailedError, DamagedFileError, NotFoundError, SchedulerRefusedError
from toolkit.rundir.claims import newest_parts
from toolkit.rundir.files import utc_now, write_text
from toolkit.rundir.find import newest_record
from toolkit.rundir.jobs import newest_job_id
from toolkit.rundir.known import is_over
from toolkit.rundir.layout import RunDirectory, make_task
from toolkit.rundir.states import RunState
from toolkit.rundir.user_requests import note_request
from toolkit.runs.record.job import is_interactive, recorded_job, slurm_of
from toolkit.runs.status.damaged import cancel_in_queue
from toolkit.runs.status.reconcile_submission import last_open_start, tasks_in
from toolkit.runs.status.state import run_status
from toolkit.runs.status.state_table import RunStatus, state_phrase

__all__ = ["cancel_run", "cancel_task", "what_follows"]


def cancel_run(run: RunDirectory) -> RunStatus:
    """Request the end of a whole run: ranks save at the next step boundary and exit.

    Raises:
        CheckFailedError: the run has already ended.
    """
    try:
        status = run_status(run)
    except DamagedFileError as error:
        return _cancel_damaged(run, error)
    if status.state.final or status.state is RunState.CREATED:
        raise CheckFailedError(
            f"run {run.run_id} {state_phrase(status.state)}; there is nothing to cancel",
            where=str(run.path),
            fix="`toolkit status --live` lists the active runs",
        )
    for part in (run, *_begun_tasks(run, status)):
        note_request(part, "cancel", "toolkit cancel")
        write_text(part.control / "cancel", utc_now() + "\n")
    # A local supervisor reads the file within a second. A signal could arrive before its handlers are installed, or
    # reach an unrelated process if it is on another host. In the user's own allocation, only the run must end. A job
    # that is being submitted has no id yet: its supervisor finds the file before it starts a rank.
    if last_open_start(run) is None and not is_interactive(run):
        job_id = newest_job_id(run)
        if not job_id.startswith("local-"):
            with _outage_in_words(run, job_id):
                slurm_of(recorded_job(run)).cancel([part.job_id for part in newest_parts(run)] or [job_id])
    return run_status(run)


def _cancel_damaged(run: RunDirectory, error: DamagedFileError) -> RunStatus:
    if is_over(run):
        raise error
    for part in run.with_tasks():
        write_text(part.control / "cancel", utc_now() + "\n")
    with _outage_in_words(run, ""):
        return cancel_in_queue(run, error)


@contextmanager
def _outage_in_words(run: RunDirectory, job_id: str) -> Iterator[None]:
    """Report an outage of Slurm after the request is written."""
    try:
        yield
    except (SchedulerRefusedError, NotFoundError) as error:
        error.message = (
            f"run {run.run_id} was asked to save and exit, which its ranks do at their next step, but "
            f"{f'job {job_id}' if job_id else 'its job'} could not be cancelled in Slurm: {error.message}"
        )
        error.where = str(run.path)
        error.fix = (
            f"once Slurm responds, `toolkit cancel {run.run_id}` removes the waiting job from the queue; "
            "one that starts before then exits without ranks. If its cluster is gone for good, "
            f"`toolkit resume {run.whole.run_id} --site OTHER --job-gone` continues elsewhere"
        )
        raise


def _begun_tasks(run: RunDirectory, status: RunStatus) -> list[RunDirectory]:
    """Return the active tasks, or those that an open submission starts again; others read the request of the run."""
    if status.tasks is None:
        living = tasks_in(newest_record(run))
    else:
        living = frozenset(task.task for task in status.tasks if not task.state.final)
    return [run.task(number) for number in run.task_numbers() if number in living]


def cancel_task(run: RunDirectory, task: int) -> RunStatus:
    """Request the end of one task of an array run, started or not.

    Raises:
        CheckFailedError: the task has already ended.
    """
    state = run_status(run.task(task)).state
    if state.final or state is RunState.CREATED:
        raise CheckFailedError(
            f"task {task} of run {run.run_id} {state_phrase(state)}; there is nothing to cancel",
            where=str(run.path),
            fix=f"`toolkit status {run.run_id} --tasks` shows the state of each task",
        )
    # Slurm forgets a task cancelled in the queue at once; one that starts at this moment sees the file.
    note_request(make_task(run, task), "cancel", "toolkit cancel")
    write_text(run.task(task).control / "cancel", utc_now() + "\n")
    if last_open_start(run) is None:
        job_id = newest_job_id(run.task(task))
        with _outage_in_words(run.task(task), job_id):
            slurm_of(recorded_job(run)).cancel([job_id])
    return run_status(run.task(task))


def what_follows(status: RunStatus) -> str:
    """Describe in one line what happens after a run or task is cancelled."""
    if status.state.final:
        return f"run {status.run_id} {state_phrase(status.state)}"
    asked = f"run {status.run_id} was asked to save and exit"
    if status.state is RunState.UNKNOWN:
        return f"{asked} ({status.reason}); if its job starts later, it exits without starting ranks"
    return f"{asked}; `toolkit wait {status.run_id}` waits for it"

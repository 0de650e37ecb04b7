"""Cancel a run: say so in `control/`, and tell Slurm where it holds the job."""

from __future__ import annotations

from toolkit.batch.state import RunStatus, run_status
from toolkit.batch.submission import recorded_job, slurm_of
from toolkit.errors import CheckFailedError
from toolkit.rundir.files import read_json, utc_now, write_text
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState


def cancel_run(run: RunDirectory, *, echo: bool = False) -> RunStatus:
    """Ask a run to end: ranks save at the next step boundary and leave.

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
    write_text(run.control / "cancel", utc_now() + "\n")
    # A local supervisor sees the file within a second. A signal could hit it before it hears signals, or, on
    # another host, hit another process. In somebody's allocation the run ends, not the allocation.
    if not status.job_id.startswith("local-") and not _is_interactive(run):
        slurm_of(recorded_job(run), echo=echo).cancel([status.job_id])
    return run_status(run)


def _is_interactive(run: RunDirectory) -> bool:
    return any(read_json(path).get("interactive") for path in sorted(run.path.glob("submitted-*.json"))[-1:])

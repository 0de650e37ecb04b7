"""Cancel a run: say so in `control/`, then tell Slurm or the supervisor."""

from __future__ import annotations

import os
import signal

from toolkit.batch.state import RunStatus, run_status
from toolkit.batch.submission import recorded_job, slurm_of
from toolkit.errors import CheckFailedError
from toolkit.rundir.files import utc_now, write_text
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
            f"run {run.run_id} is {status.state.value}; there is nothing to cancel", where=str(run.path)
        )
    write_text(run.control / "cancel", utc_now() + "\n")
    if status.job_id.startswith("local-"):
        os.kill(int(status.job_id.removeprefix("local-")), signal.SIGTERM)
    else:
        slurm_of(recorded_job(run), echo=echo).cancel([status.job_id])
    return run_status(run)

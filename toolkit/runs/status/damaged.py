"""Report the remaining facts of a run with damaged files, and end its job, which may still be running."""

import shutil
from dataclasses import replace
from pathlib import Path

from toolkit.errors import DamagedFileError, ToolkitError
from toolkit.rundir.find import home_of
from toolkit.rundir.jobs import readable_job_ids
from toolkit.rundir.known import is_over
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.runs.record.job import recorded_job, slurm_of, uses_slurm
from toolkit.runs.status.state_table import RunStatus
from toolkit.runs.status.unknown_names import slurm_here
from toolkit.slurm.commands import Slurm, prints_commands
from toolkit.slurm.marked import marked_jobs
from toolkit.slurm.records import with_cluster_option

__all__ = ["with_way_out"]


def unreadable(run: RunDirectory, error: ToolkitError) -> RunStatus:
    """Return the status of a run with unreadable files, from the readable ones, for lists of many runs."""
    job_id = _newest_job(run)
    cluster, site = home_of(run, job_id)
    reason = str(error)
    if isinstance(error, DamagedFileError) and (path := Path(error.where.partition(":")[0])).is_relative_to(run.path):
        reason = f"{path.relative_to(run.path)} is damaged: `toolkit status {run.run_id}` explains how to continue"
    return RunStatus(
        run_id=run.run_id, job_name=run.job_name, state=RunState.UNKNOWN, site=site, job_id=job_id, reason=reason,
        source="none", nodes=0, ranks=0, starts=0, attempts=0, step=None, exit_code=None, path=str(run.path),
        cluster=cluster,
    )  # fmt: skip


def with_way_out(error: DamagedFileError) -> DamagedFileError:
    """Add the command that ends the job of the damaged run, if a job is known and may still run."""
    run = next((RunDirectory(path).whole for path in Path(error.where).parents if _is_run(path)), None)
    if run is None or is_over(run) or not (job_id := _newest_job(run)):
        return error
    ends = f"`toolkit cancel {run.run_id}`"
    if not job_id.startswith("local-"):
        ends += with_cluster_option(f" or `scancel {job_id}`", home_of(run, job_id)[0])
    error.fix += f"; job {job_id} may still be active, and {ends} ends it"
    return error


def cancel_in_queue(run: RunDirectory, error: DamagedFileError) -> RunStatus:
    """Cancel the queued jobs of a run, found by their comments because its own files do not name them.

    Raises:
        SchedulerRefusedError, NotFoundError: Slurm does not respond, or refused.
    """
    status = unreadable(run, error)
    damage = status.reason.partition(":")[0]
    slurm = _slurm_of(run)
    if status.job_id.startswith("local-"):
        return replace(status, reason=damage)
    if slurm is None:
        return replace(status, reason=f"{damage}, and this host has no Slurm")
    found = [job.job_id for job in marked_jobs(slurm) if job.run_id == run.run_id]
    if not found:
        return replace(status, reason=f"{damage}, and the run has no job in the queue")
    slurm.cancel(list(dict.fromkeys(found)))
    return replace(status, reason=f"{damage}, so `scancel {' '.join(dict.fromkeys(found))}` was executed immediately")


def _slurm_of(run: RunDirectory) -> Slurm | None:
    """Return Slurm's commands for the recorded cluster of a run, or else for the cluster of this host."""
    try:
        job = recorded_job(run)
    except DamagedFileError:
        return slurm_here() or (Slurm(echo=prints_commands()) if shutil.which("squeue") else None)
    return slurm_of(job) if uses_slurm(job) else None


def _newest_job(run: RunDirectory) -> str:
    try:
        return next(reversed(readable_job_ids(run)), "").partition("_")[0]
    except PermissionError:  # the run belongs to another user
        return ""


def _is_run(path: Path) -> bool:
    return (path / "control").is_dir() and (path / "attempts").is_dir()

"""A run whose files are damaged: what is known of it all the same, and how its job, which lives on, is ended."""

from __future__ import annotations

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
from toolkit.slurm.commands import Slurm
from toolkit.slurm.marked import marked_jobs
from toolkit.slurm.records import with_cluster_option


def unreadable(run: RunDirectory, error: ToolkitError) -> RunStatus:
    """The status of a run whose files cannot be read, with what the others tell, so that a list of many runs can show it."""
    job_id = _newest_job(run)
    cluster, site = home_of(run, job_id)
    reason = str(error)
    if isinstance(error, DamagedFileError) and (path := Path(error.where.partition(":")[0])).is_relative_to(run.path):
        reason = f"{path.relative_to(run.path)} is damaged: `toolkit status {run.run_id}` says how to go on"
    return RunStatus(
        run_id=run.run_id, job_name=run.job_name, state=RunState.UNKNOWN, site=site, job_id=job_id, reason=reason,
        source="none", nodes=0, ranks=0, starts=0, attempts=0, step=None, exit_code=None, path=str(run.path),
        cluster=cluster,
    )  # fmt: skip


def with_way_out(error: DamagedFileError) -> DamagedFileError:
    """The error with the command that ends the job of the damaged run, where one is known and may live on."""
    run = next((RunDirectory(path).whole for path in Path(error.where).parents if _is_run(path)), None)
    if run is None or is_over(run) or not (job_id := _newest_job(run)):
        return error
    ends = f"`toolkit cancel {run.run_id}`"
    if not job_id.startswith("local-"):
        ends += with_cluster_option(f" or `scancel {job_id}`", home_of(run, job_id)[0])
    error.fix += f"; job {job_id} may live on, and {ends} ends it"
    return error


def cancel_in_queue(run: RunDirectory, error: DamagedFileError) -> RunStatus:
    """Cancel the jobs that the queue has of a run, as their comments tell, where its own files do not.

    Raises:
        SchedulerRefusedError, NotFoundError: Slurm does not answer, or refused.
    """
    status = unreadable(run, error)
    damage = status.reason.partition(":")[0]
    slurm = _slurm_of(run)
    if status.job_id.startswith("local-"):
        return replace(status, reason=damage)
    if slurm is None:
        return replace(status, reason=f"{damage}, and there is no Slurm here")
    found = [job.job_id for job in marked_jobs(slurm) if job.run_id == run.run_id]
    if not found:
        return replace(status, reason=f"{damage}, and the queue has no job of it")
    slurm.cancel(list(dict.fromkeys(found)))
    return replace(status, reason=f"{damage}, so `scancel {' '.join(dict.fromkeys(found))}` was done at once")


def _slurm_of(run: RunDirectory) -> Slurm | None:
    """Slurm's commands for the cluster that a run recorded, else for the one that is here."""
    try:
        job = recorded_job(run)
    except DamagedFileError:
        return slurm_here() or (Slurm() if shutil.which("squeue") else None)
    return slurm_of(job) if uses_slurm(job) else None


def _newest_job(run: RunDirectory) -> str:
    try:
        return next(reversed(readable_job_ids(run)), "").partition("_")[0]
    except PermissionError:  # another user's
        return ""


def _is_run(path: Path) -> bool:
    return (path / "control").is_dir() and (path / "attempts").is_dir()

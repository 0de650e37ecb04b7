"""Explain a name that is not that of a run: a queued job without a run directory, or a session."""

from dataclasses import replace
from pathlib import Path

from toolkit.errors import NotFoundError, SchedulerRefusedError, ToolkitError
from toolkit.rundir.find import parse_run_name
from toolkit.rundir.layout import RunDirectory, session_names
from toolkit.site.load import detect_site
from toolkit.slurm.commands import Slurm, slurm_of_site
from toolkit.slurm.job_facts import run_state
from toolkit.slurm.marked import MarkedJob, marked_jobs
from toolkit.slurm.records import named, with_cluster_option

_QUESTION_S = 10.0


def known_otherwise(name: str, runs: Path) -> NotFoundError | None:
    """Explain an unknown name from the sessions and the queue; None if neither has it, or if Slurm does not respond."""
    if name in session_names():
        fix = f"`toolkit run JOB --session {name}` runs on its nodes, `toolkit session stop {name}` releases them"
        return NotFoundError(f"{name} is a session, not a run", where=str(runs), fix=fix)
    parts = parse_run_name(name)
    if parts is None or parts.run == "last":
        return None
    slurm = slurm_here(parts.cluster)
    if slurm is None:
        return None
    try:
        living = [job for job in marked_jobs(slurm) if not run_state(job.state).final]
    except (SchedulerRefusedError, NotFoundError):
        return None
    run_id = parts.run.rpartition("/")[2]
    found = [job for job in living if (parts.job_id in job.ids if parts.job_id else job.run_id.startswith(run_id))]
    return _found(found[0], parts.cluster, runs) if found else None


def vanished(run: RunDirectory) -> NotFoundError:
    """Explain a run whose directory was removed while a command used it."""
    whole = run.whole
    return known_otherwise(whole.run_id, whole.path.parents[1]) or NotFoundError(
        f"the directory of run {whole.run_id} was removed",
        where=str(whole.path),
        fix="`squeue --me` shows whether its job still exists; `toolkit history` lists the existing runs",
    )


def slurm_here(cluster: str = "") -> Slurm | None:
    """Return the Slurm commands for this host's site; None without Slurm."""
    try:
        scheduler = detect_site().site.scheduler
    except ToolkitError:  # no site is detected on this host
        return None
    return (
        replace(slurm_of_site(scheduler, cluster=cluster), timeout_s=_QUESTION_S) if scheduler.kind == "slurm" else None
    )


def _found(job: MarkedJob, cluster: str, runs: Path) -> NotFoundError:
    what = f"job {named(job.job_id, cluster)} ({job.state})"
    if job.session:
        what += f" is session {job.session}, not a run"
        fix = f"`toolkit session stop {job.session}`, or `scancel {job.job_id}`"
    elif job.run_id:
        what += f" is in the queue, but its run {job.run_id} is not in this folder"
        fix = f"`scancel {job.job_id}` ends it; if the run is in another folder, pass that folder with --runs"
    else:
        what += " is in the queue, but toolkit did not submit it"
        fix = f"`scancel {job.job_id}` ends it; `scontrol show job {job.job_id}` shows its details"
    return NotFoundError(what, where=str(runs), fix=with_cluster_option(fix, cluster))

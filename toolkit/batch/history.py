"""All runs below RUNS, the newest first, with one question to each cluster for all that still live."""

from __future__ import annotations

from pathlib import Path

from toolkit.batch.state import Answer, RunStatus, ask_slurm, final_word, run_status, unreadable
from toolkit.batch.submission import recorded_job, slurm_of, uses_slurm
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.rundir.find import iterate_runs, job_ids
from toolkit.rundir.layout import RunDirectory


def list_runs(runs: Path, *, job: str = "", limit: int = 0) -> list[RunStatus]:
    """The status of each run, newest first; `job` filters by job name, `limit` 0 lists all.

    A run whose files are damaged is listed as unknown, with what is wrong with them.
    """
    chosen = [run for run in iterate_runs(runs) if not job or run.job_name == job]
    chosen = chosen[:limit] if limit else chosen
    jobs: dict[RunDirectory, ResolvedJob | ToolkitError] = {}
    for run in chosen:
        try:
            jobs[run] = recorded_job(run)
        except ToolkitError as error:
            jobs[run] = error
    answers = _ask_once(jobs)
    return [
        unreadable(run, known) if isinstance(known, ToolkitError) else run_status(run, answers.get(_cluster(known), {}))
        for run, known in jobs.items()
    ]  # fmt: skip


def _cluster(job: ResolvedJob) -> str:
    return slurm_of(job).configuration


def _ask_once(jobs: dict[RunDirectory, ResolvedJob | ToolkitError]) -> dict[str, Answer]:
    """Each cluster's answer for all of its jobs that may still live."""
    wanted: dict[str, list[str]] = {}
    cluster_jobs: dict[str, ResolvedJob] = {}
    for run, job in jobs.items():
        ids = job_ids(run)
        if isinstance(job, ToolkitError) or not uses_slurm(job) or not ids or final_word(run):
            continue
        cluster_jobs[_cluster(job)] = job
        wanted.setdefault(_cluster(job), []).append(ids[-1])
    return {cluster: ask_slurm(cluster_jobs[cluster], ids) for cluster, ids in wanted.items()}

"""All runs below RUNS, the newest first, with one question to each cluster for all that still live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.batch.living import Answer
from toolkit.batch.state import RunStatus, ask_slurm, ids_to_ask, run_status, unreadable
from toolkit.batch.submission import recorded_job, slurm_of
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.rundir.find import has_begun, iterate_runs
from toolkit.rundir.layout import RunDirectory


def list_runs(runs: Path, *, job: str = "", limit: int = 0) -> list[RunStatus]:
    """The status of each run, newest first; `job` filters by job name, `limit` 0 lists all."""
    chosen = [run for run in iterate_runs(runs) if not job or run.job_name == job]
    return statuses_of(chosen[:limit] if limit else chosen)


def living_runs(runs: Path, *, echo: bool = False) -> list[RunStatus]:
    """The status of each run that was submitted and has not ended, newest first."""
    begun = [run for run in iterate_runs(runs) if has_begun(run)]
    return [status for status in statuses_of(begun, echo=echo) if not status.state.final]


def statuses_of(runs: Sequence[RunDirectory], *, echo: bool = False) -> list[RunStatus]:
    """The status of some runs, with one question to each cluster.

    A run whose files are damaged is unknown, with what is wrong with them.
    """
    jobs: dict[RunDirectory, ResolvedJob | ToolkitError] = {}
    for run in runs:
        try:
            jobs[run] = recorded_job(run)
        except ToolkitError as error:
            jobs[run] = error
    answers = _ask_once(jobs, echo=echo)
    return [_status(run, known, answers, echo=echo) for run, known in jobs.items()]


def _status(
    run: RunDirectory, known: ResolvedJob | ToolkitError, answers: Mapping[str, Answer], *, echo: bool
) -> RunStatus:
    if isinstance(known, ToolkitError):
        return unreadable(run, known)
    try:
        return run_status(run, answers.get(_cluster(known), {}), echo=echo)
    except ToolkitError as error:  # one damaged run hides no other
        return unreadable(run, error)


def _cluster(job: ResolvedJob) -> str:
    return slurm_of(job).configuration


def _ask_once(jobs: Mapping[RunDirectory, ResolvedJob | ToolkitError], *, echo: bool) -> dict[str, Answer]:
    """Each cluster's answer for all of its jobs that may still live."""
    wanted: dict[str, list[str]] = {}
    cluster_jobs: dict[str, ResolvedJob] = {}
    for run, job in jobs.items():
        if isinstance(job, ToolkitError):
            continue
        try:
            ids = ids_to_ask(run, job)
        except ToolkitError:
            continue  # a damaged file of the run, which its status names
        if ids:
            cluster_jobs[_cluster(job)] = job
            wanted.setdefault(_cluster(job), []).extend(ids)
    return {cluster: ask_slurm(cluster_jobs[cluster], ids, echo=echo) for cluster, ids in wanted.items()}

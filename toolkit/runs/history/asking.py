"""The status of runs that no index tells: from their own files, and with one question to each cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.rundir.files import permissions_in_words
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.record.job import recorded_job, slurm_of
from toolkit.runs.status.damaged import unreadable
from toolkit.runs.status.reconcile_submission import last_open_start
from toolkit.runs.status.run_status import RunStatus
from toolkit.runs.status.slurm_state import Answer
from toolkit.runs.status.state import ask_slurm, ids_to_ask, run_status
from toolkit.slurm.commands import Slurm


def own_status(run: RunDirectory) -> RunStatus | None:
    """The status of a run whose own files tell it; None of one that may live."""
    try:
        with permissions_in_words():
            job = recorded_job(run)
            if last_open_start(run) is None and not ids_to_ask(run, job):
                return run_status(run, {})
    except ToolkitError as error:
        return unreadable(run, error)
    return None


def statuses_of(runs: Sequence[RunDirectory]) -> list[RunStatus]:
    """As `told_of`; a run whose files are damaged is unknown, with what is wrong with them."""
    told = cached_statuses(runs)
    return [unreadable(run, one) if isinstance(one, ToolkitError) else one for run, one in told.items()]


def cached_statuses(runs: Sequence[RunDirectory]) -> dict[RunDirectory, RunStatus | ToolkitError]:
    """The status of some runs, or what is wrong with their files, with one question to each cluster."""
    jobs = jobs_of(runs)
    answers = ask_once(jobs)
    return {run: _status(run, known, answers) for run, known in jobs.items()}


def jobs_of(runs: Sequence[RunDirectory]) -> dict[RunDirectory, ResolvedJob | ToolkitError]:
    """The job of each run, or what is wrong with its files."""
    jobs: dict[RunDirectory, ResolvedJob | ToolkitError] = {}
    for run in runs:
        try:
            with permissions_in_words():
                jobs[run] = recorded_job(run)
        except ToolkitError as error:
            jobs[run] = error
    return jobs


def _status(
    run: RunDirectory, known: ResolvedJob | ToolkitError, answers: Mapping[Slurm, Answer]
) -> RunStatus | ToolkitError:
    if isinstance(known, ToolkitError):
        return known
    try:
        with permissions_in_words():
            return run_status(run, answers.get(slurm_of(known), {}))
    except ToolkitError as error:  # one damaged run hides no other
        return error


def ask_once(jobs: Mapping[RunDirectory, ResolvedJob | ToolkitError]) -> dict[Slurm, Answer]:
    """Each cluster's answer for all of its jobs that may still live."""
    wanted: dict[Slurm, list[str]] = {}
    cluster_jobs: dict[Slurm, ResolvedJob] = {}
    for run, job in jobs.items():
        if isinstance(job, ToolkitError):
            continue
        try:
            with permissions_in_words():
                ids = ids_to_ask(run, job)
        except ToolkitError:
            continue  # a damaged file of the run, which its status names
        if ids:
            cluster_jobs[slurm_of(job)] = job
            wanted.setdefault(slurm_of(job), []).extend(ids)
    return {cluster: ask_slurm(cluster_jobs[cluster], ids) for cluster, ids in wanted.items()}

"""`--after RUN[:ok|any]`: find the run, check that it can still end as required, and return its Slurm job."""

from collections.abc import Sequence
from pathlib import Path

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import CheckFailedError, ToolkitError, all_of
from toolkit.rundir.claims import newest_parts
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.runs.named_runs import find_named
from toolkit.runs.record.job import recorded_job, slurm_of, uses_slurm
from toolkit.runs.record.parents import KINDS, Parent
from toolkit.runs.status.state import run_status
from toolkit.runs.status.state_table import RunStatus, state_phrase
from toolkit.slurm.records import named
from toolkit.terminal.talk import say

__all__ = ["find_parents"]


def find_parents(texts: Sequence[str], job: ResolvedJob, runs: Path, *, is_only: bool) -> list[Parent]:
    """Return the runs that `job` must follow, from the values of --after; `runs` and `is_only` as for `find_named`.

    Raises one error for all invalid values:
        NotFoundError: there is no such run.
        CheckFailedError: a run can no longer end as required, was never submitted, or its state is unknown.
        ToolkitError: the scheduler of the job cannot wait for a run.
    """
    parents: dict[str, Parent] = {}
    refused: list[ToolkitError] = []
    for text in texts:
        try:
            name, kind = split_kind(text)
            run = find_named(name, runs, is_only=is_only)
            if (before := parents.get(run.run_id)) is not None and before.kind != kind:
                raise ToolkitError(
                    f"run {run.run_id} is passed with both :ok and :any", where=f"--after {text}", fix="omit one"
                )
            parents[run.run_id] = _parent(run, kind, job, f"--after {text}")
        except ToolkitError as error:
            refused.append(error)
    if refused:
        raise all_of(refused)
    return list(parents.values())


def split_kind(text: str) -> tuple[str, str]:
    """Return RUN and its kind, "ok" by default. A path as RUN may contain a colon."""
    name, colon, kind = text.rpartition(":")
    if not colon or "/" in kind:
        return text, "ok"
    if kind not in KINDS or not name:
        raise ToolkitError(
            f"expected RUN, RUN:ok or RUN:any, got {text!r}", where=f"--after {text}",
            fix=f"write {name or 'RUN'}:ok to require success, {name or 'RUN'}:any to follow any outcome",
        )  # fmt: skip
    return name, kind


def _parent(run: RunDirectory, kind: str, job: ResolvedJob, where: str) -> Parent:
    status = run_status(run)
    if status.state is RunState.CREATED:
        raise CheckFailedError(
            f"run {run.run_id} was rendered but not submitted", where=where, fix=f"submit it first: {run.script(0)}"
        )
    if status.state is RunState.COMPLETED or (status.state.final and kind == "any"):
        say(f"run {run.run_id} {state_phrase(status.state)}, so the job need not wait for it")
        return Parent(run.run_id, kind, "", str(run.path))
    if status.state.final:
        raise CheckFailedError(
            f"run {run.run_id} {state_phrase(status.state)}, so a job that requires its success would never start: {status.reason}",
            where=where,
            fix=f"`toolkit resume {run.run_id}` first, or pass --after {run.run_id}:any",
        )
    if status.state is RunState.UNKNOWN:
        raise CheckFailedError(
            f"the state of run {run.run_id} is unknown: {status.reason}", where=where,
            fix=f"repeat `toolkit status {run.run_id}` until the state is known",
        )  # fmt: skip
    _check_same_cluster(run, status, job, where)
    if kind == "ok" and recorded_job(run).job.repeat > 1:
        raise CheckFailedError(
            f"run {run.run_id} has {recorded_job(run).job.repeat} repeated jobs, and Slurm cannot distinguish the success of the run from that of one job",
            where=where,
            fix=f"`toolkit wait {run.run_id} && toolkit submit ...`, or --after {run.run_id}:any if the job may also follow a failure",
        )  # fmt: skip
    jobs = [part.job_id for part in newest_parts(run)] if run.task_number is None else []
    return Parent(run.run_id, kind, ":".join(jobs) or status.job_id, str(run.path))


def _check_same_cluster(run: RunDirectory, status: RunStatus, job: ResolvedJob, where: str) -> None:
    """Refuse a parent on another cluster: Slurm can only wait for jobs on the same cluster."""
    parent = recorded_job(run)
    if not uses_slurm(job):
        raise ToolkitError(
            f"site {job.site.name} has no scheduler that could wait for a run", where=where,
            fix=f"`toolkit wait {run.run_id}` first, then submit",
        )  # fmt: skip
    if status.job_id.startswith("local-") or slurm_of(parent) != slurm_of(job):
        raise ToolkitError(
            f"run {run.run_id} ({_job_in_words(status.job_id, parent)}) is not a Slurm job of {_cluster_in_words(job)}",
            where=where, fix=f"`toolkit wait {run.run_id}` first, then submit",
        )  # fmt: skip


def _job_in_words(job_id: str, job: ResolvedJob) -> str:
    return f"job {named(job_id, job.job.cluster)}, site {job.site.name}"


def _cluster_in_words(job: ResolvedJob) -> str:
    return f"cluster {job.job.cluster}" if job.job.cluster else f"site {job.site.name}"

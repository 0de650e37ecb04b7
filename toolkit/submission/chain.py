"""`--after RUN[:ok|any]`: the run, whether it can still end as required, and the job that Slurm waits for."""

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
from toolkit.runs.status.state_table import RunStatus
from toolkit.slurm.records import named
from toolkit.terminal.talk import say

__all__ = ["find_parents"]


def find_parents(texts: Sequence[str], job: ResolvedJob, runs: Path) -> list[Parent]:
    """Return the runs that `job` is to follow, by the values of --after.

    Raises, for all that are wrong together:
        NotFoundError: there is no such run.
        CheckFailedError: it can no longer end as the job wants it to, was never submitted, or its state is unknown.
        ToolkitError: no scheduler of the job's could wait for it.
    """
    parents: dict[str, Parent] = {}
    refused: list[ToolkitError] = []
    for text in texts:
        try:
            name, kind = split_kind(text)
            run = find_named(name, runs)
            if (before := parents.get(run.run_id)) is not None and before.kind != kind:
                raise ToolkitError(
                    f"run {run.run_id} is named with both kinds", where=f"--after {text}", fix="omit one"
                )
            parents[run.run_id] = _parent(run, kind, job, f"--after {text}")
        except ToolkitError as error:
            refused.append(error)
    if refused:
        raise all_of(refused)
    return list(parents.values())


def split_kind(text: str) -> tuple[str, str]:
    """Return RUN and its kind, "ok" by default. A path may contain a colon."""
    name, colon, kind = text.rpartition(":")
    if not colon or "/" in kind:
        return text, "ok"
    if kind not in KINDS or not name:
        raise ToolkitError(
            f"expected RUN, RUN:ok or RUN:any, got {text!r}", where=f"--after {text}",
            fix=f"write {name or 'RUN'}:ok for its success, {name or 'RUN'}:any for any end",
        )  # fmt: skip
    return name, kind


def _parent(run: RunDirectory, kind: str, job: ResolvedJob, where: str) -> Parent:
    status = run_status(run)
    if status.state is RunState.CREATED:
        raise CheckFailedError(
            f"run {run.run_id} is rendered, not submitted", where=where, fix=f"submit it first: {run.script(0)}"
        )
    if status.state is RunState.COMPLETED or (status.state.final and kind == "any"):
        say(f"run {run.run_id} is {status.state.value} already, so the job need not wait for it")
        return Parent(run.run_id, kind, "", str(run.path))
    if status.state.final:
        raise CheckFailedError(
            f"run {run.run_id} is {status.state.value}, so nothing would ever follow its success: {status.reason}",
            where=where,
            fix=f"`toolkit resume {run.run_id}` first, or --after {run.run_id}:any",
        )
    if status.state is RunState.UNKNOWN:
        raise CheckFailedError(
            f"the state of run {run.run_id} is unknown: {status.reason}", where=where,
            fix=f"ask `toolkit status {run.run_id}` until it is known",
        )  # fmt: skip
    _check_same_cluster(run, status, job, where)
    if kind == "ok" and recorded_job(run).job.repeat > 1:
        raise CheckFailedError(
            f"run {run.run_id} is {recorded_job(run).job.repeat} repeated jobs, and Slurm cannot distinguish its success from theirs",
            where=where,
            fix=f"`toolkit wait {run.run_id} && toolkit submit ...`, or --after {run.run_id}:any where a failure may be followed, too",
        )  # fmt: skip
    jobs = [part.job_id for part in newest_parts(run)] if run.task_number is None else []
    return Parent(run.run_id, kind, ":".join(jobs) or status.job_id, str(run.path))


def _check_same_cluster(run: RunDirectory, status: RunStatus, job: ResolvedJob, where: str) -> None:
    """Refuse a run of another cluster: Slurm waits for its own jobs only."""
    parent = recorded_job(run)
    if not uses_slurm(job):
        raise ToolkitError(
            f"site {job.site.name} has no scheduler that could wait for a run", where=where,
            fix=f"`toolkit wait {run.run_id}` first, then submit",
        )  # fmt: skip
    if status.job_id.startswith("local-") or slurm_of(parent) != slurm_of(job):
        raise ToolkitError(
            f"run {run.run_id} ({_job_in_words(status.job_id, parent)}) is not a job of {_cluster_in_words(job)}",
            where=where, fix=f"`toolkit wait {run.run_id}` first, then submit",
        )  # fmt: skip


def _job_in_words(job_id: str, job: ResolvedJob) -> str:
    return f"job {named(job_id, job.job.cluster)}, site {job.site.name}"


def _cluster_in_words(job: ResolvedJob) -> str:
    return f"cluster {job.job.cluster}" if job.job.cluster else f"{job.site.name}'s Slurm"

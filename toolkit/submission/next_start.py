"""The steps of `resume`, the next start of a run, and of `rerun`, a new run that repeats another one."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.config.amend import amend_job, move_job, nodes_after
from toolkit.config.document import Flag
from toolkit.config.rank_count import flags_of_ranks, needs_nodes
from toolkit.config.request import JobRequest, from_command_line, site_of_record
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.sweep import read_sweep
from toolkit.runs.named_runs import find, site_runs
from toolkit.runs.record.job import first_job, recorded_job, uses_slurm
from toolkit.site.load import choose_site
from toolkit.slurm.commands import NoAnswerError
from toolkit.submission.allocation import check_here
from toolkit.submission.create import check_sbatch_options, make_run, parents_of, submit, submit_new
from toolkit.submission.preflight.checks import FORCED, look, report_cost, require_good
from toolkit.submission.resume import Changes, NextStart, prepare_resume, undo_resume
from toolkit.submission.run_handle import Run
from toolkit.submission.run_here import flags_of_allocation
from toolkit.submission.sweep.sweep import ResolvedSweep, resolve_again

__all__ = ["job_to_repeat", "prepare_next", "rerun", "resume", "submit_next", "sweep_to_repeat"]


def job_to_repeat(
    run: RunDirectory,
    *,
    settings: Sequence[str] = (),
    flags: Mapping[str, Flag] | None = None,
    site: Site | None = None,
) -> ResolvedJob:
    """Return the job of a run as it was first submitted, with these changes.

    The recorded settings of the site apply, even if its file has changed; a new `site` applies in its current form. A
    task of an array is repeated as an array of that task alone.

    Raises:
        ToolkitError: a value is invalid, or the site does not allow it.
    """
    recorded = first_job(run)
    changed = dict(flags or {})
    if run.task_number is not None:
        changed.setdefault("job.array", Flag(str(run.task_number), "the task that is repeated"))
    if not settings and not changed and site is None:
        return recorded
    if site is None:
        _check_partition(recorded, settings, changed)
    before = move_job(recorded, site, os.environ) if site is not None else recorded
    return amend_job(before, site=site or site_of_record(recorded), settings=settings, flags=changed)


def sweep_to_repeat(run: RunDirectory, job: ResolvedJob, site: Site | None) -> ResolvedSweep | None:
    """Return the sweep of a run whose job is repeated as `job`; None for a run without a sweep.

    Raises:
        ToolkitError: a task is invalid with the changes.
    """
    sweep = read_sweep(run.whole)
    return resolve_again(job, site or site_of_record(job), sweep) if sweep is not None else None


def _check_partition(recorded: ResolvedJob, settings: Sequence[str], flags: Mapping[str, Flag]) -> None:
    """Refuse a change of the partition: the record of a run contains the limits of only one."""
    asked = {one.path: one for one in from_command_line(settings, flags)}.get(("job", "partition"))
    if asked is not None and recorded.partition_limits is not None and asked.value != recorded.job.partition:
        raise ToolkitError(
            f"cannot change the partition: the run recorded only the limits of {recorded.job.partition}",
            where=asked.origin.detail,
            fix=f"add --site {recorded.site.name} to use the current site file",
        )


def resume(
    request: JobRequest, *, checkpoint: str | None = None, same_code: bool = False, job_gone: bool = False,
    force: bool = False,
) -> Run:  # fmt: skip
    """Submit the next start of the run that `request.job` names.

    Raises:
        ToolkitError: the run is active, a value is invalid, or preflight or sbatch refuses it; the run is unchanged.
    """
    prepared = prepare_next(request, checkpoint=checkpoint, same_code=same_code, job_gone=job_gone)
    return submit_next(prepared, request, force=force)


def prepare_next(
    request: JobRequest, *, checkpoint: str | None = None, same_code: bool = False, job_gone: bool = False,
    here: bool = False,
) -> NextStart:  # fmt: skip
    """Prepare the next start of a run; if `here`, in the foreground, which on a Slurm site needs an allocation."""
    part = find(request.job, request.runs, changes=True)
    recorded = recorded_job(part)
    site = choose_site(request.site).site if request.site else None
    scheduler = site.scheduler if site else recorded.scheduler
    if here and scheduler.kind == "slurm":
        request = request.with_flags(flags_of_allocation(request.flags, request.ranks, request.settings))
    flags = _flags_over(recorded, request)
    options = check_sbatch_options(request.sbatch_options, for_sbatch=scheduler.kind == "slurm" and not here)
    moved = recorded.model_copy(update={"scheduler": scheduler})
    after = parents_of(request, moved, site_runs(request.runs))
    changes = Changes(request.settings, flags, options, checkpoint, site, same_code, after, job_gone, request.argv)
    prepared = prepare_resume(part, changes)
    try:
        if here:
            check_here(prepared.job, os.environ, resumed=part.run_id)
    except ToolkitError:
        undo_resume(prepared)
        raise
    return prepared


def submit_next(prepared: NextStart, request: JobRequest, *, force: bool = False) -> Run:
    """Submit the prepared start of a run; if it is refused, the run is unchanged."""
    options = check_sbatch_options(request.sbatch_options, for_sbatch=uses_slurm(prepared.job))
    part, job = prepared.part, prepared.job
    try:
        found = look(job, _runs_of(part), extra_sbatch_options=options, run=part, recorded=part.whole.job_file)
        report_cost(require_good(found, instead=FORCED if force else ""))
        submitted = submit(part.whole, job, prepared.number)
    except (NoAnswerError, OwnFailureError):
        raise  # the job may be in the queue
    except ToolkitError:
        undo_resume(prepared)
        raise
    return Run(part.path, submitted.job_id, submitted.cluster)


def rerun(request: JobRequest, *, force: bool = False) -> Run:
    """Submit a new run with the configuration, the code and the data of the run that `request.job` names."""
    before = find(request.job, request.runs)
    site = choose_site(request.site).site if request.site else None
    flags = _flags_over(first_job(before), request)
    job = job_to_repeat(before, settings=request.settings, flags=flags, site=site)
    options = check_sbatch_options(request.sbatch_options, for_sbatch=uses_slurm(job))
    runs = _runs_of(before)
    sweep = sweep_to_repeat(before, job, site)
    found = look(job, runs, site=site, extra_sbatch_options=options, recorded=before.whole.job_file)
    cost = require_good(found, instead=FORCED if force else "")
    repeated = make_run(job, runs, extra_sbatch_options=options, repeats=before, sweep=sweep)
    report_cost(cost)
    submitted = submit_new(repeated, job)
    return Run(repeated.path, submitted.job_id, submitted.cluster)


def _runs_of(part: RunDirectory) -> Path:
    return part.whole.path.parents[1]


def _flags_over(recorded: ResolvedJob, request: JobRequest) -> dict[str, Flag]:
    """Return the flags of a request; a total number of ranks (-n) is spread over the nodes of the recorded job."""
    flags = dict(request.flags)
    if request.ranks is None:
        return flags
    if recorded.job.ranks:
        return flags | {"job.ranks": Flag(request.ranks, "-n")}
    nodes, each = request.typed("job.nodes"), request.typed("job.ranks_per_node")
    if needs_nodes(request.ranks, nodes, each):
        nodes = nodes_after(recorded, request.settings)
    return flags | flags_of_ranks(request.ranks, nodes, each)

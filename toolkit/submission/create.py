"""From a request to a submitted run, in one sequence: site, partition, sweep, preflight, run directory, script, sbatch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config.document import Flag
from toolkit.config.request import JobRequest
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.rundir.find import runs_folder
from toolkit.rundir.layout import RunDirectory, discard_run
from toolkit.runs.record.job import uses_slurm
from toolkit.site.detect import choose_site
from toolkit.site.partitions import resolve_on
from toolkit.submission.preflight.checks import Preflight, look
from toolkit.submission.preflight.report import FORCED, RENDERED, report_cost, require_good
from toolkit.submission.run_handle import Run
from toolkit.submission.submit_run import check_sbatch_options, make_run, submit_new
from toolkit.talk import say

if TYPE_CHECKING:
    from toolkit.runs.record.parents import Parent
    from toolkit.submission.sweep.rows import Row
    from toolkit.submission.sweep.sweep import ResolvedSweep

__all__ = ["create", "parents_of", "preflight", "render", "script_of"]


@dataclass(frozen=True)
class _Planned:
    """A job that is resolved on its site, before anything is written."""

    job: ResolvedJob
    site: Site
    runs: Path
    sbatch_options: Sequence[str]
    sweep: ResolvedSweep | None = None
    parents: Sequence[Parent] = ()


def create(request: JobRequest, *, force: bool = False) -> Run:
    """Submit a new run: to Slurm, or into the background of this machine on a site without a scheduler.

    `force` submits the job although preflight refuses it.

    Raises:
        ToolkitError: the request is wrong, or preflight, sbatch or the disk refuses it; no run remains.
        UnsettledError: Slurm did not confirm that it has the job; the run remains.
    """
    planned = _plan(request)
    run = _make(planned, request, instead=FORCED if force else "")
    submitted = submit_new(run, planned.job)
    return Run(run.path, submitted.job_id, submitted.cluster)


def render(request: JobRequest) -> RunDirectory:
    """Make a run with its script, and submit nothing; what preflight refuses is reported only."""
    return _make(_plan(request), request, instead=RENDERED)


def script_of(request: JobRequest) -> str:
    """Return the script that `create` would submit; nothing remains of the run."""
    run = render(request)
    script = run.script(0).read_text(encoding="utf-8")
    discard_run(run)
    return script


def preflight(request: JobRequest) -> Preflight:
    """Return what preflight finds in a job; nothing is written.

    Raises:
        ToolkitError: the request is wrong, or its ranks could not start.
    """
    from toolkit.submission.entry_checks import check_beginning, check_secrets

    planned = _plan(request)
    check_beginning(planned.job, planned.sbatch_options)
    check_secrets(planned.job, os.environ)
    return look(planned.job, planned.runs, site=planned.site, extra_sbatch_options=planned.sbatch_options)


def _plan(request: JobRequest) -> _Planned:
    """Choose the site and the partition, and resolve the job, its sweep and the runs that it follows."""
    is_swept = bool(request.sweeps) or request.grid is not None
    rows = _rows_of(request) if is_swept else ()
    if is_swept:
        request = _with_array(request, rows)
    site = choose_site(request.site).site
    job = resolve_on(request, site, say, limits=False)
    options = check_sbatch_options(request.sbatch_options, for_sbatch=uses_slurm(job))
    sweep = _swept(job, site, rows) if is_swept else None
    runs = runs_folder(request.runs, os.environ, job.paths.runs)
    return _Planned(job, site, runs, options, sweep, parents_of(request.after, job, runs))


def _rows_of(request: JobRequest) -> Sequence[Row]:
    from toolkit.submission.sweep.sweep import read_sweep_options

    return read_sweep_options(request.sweeps, request.grid)


def _with_array(request: JobRequest, rows: Sequence[Row]) -> JobRequest:
    from toolkit.submission.sweep.sweep import array_of

    return request.with_flags({"job.array": Flag(array_of(rows, request.typed("job.array")), "-a")})


def _swept(job: ResolvedJob, site: Site, rows: Sequence[Row]) -> ResolvedSweep:
    from toolkit.submission.sweep.sweep import resolve_sweep, warn_of_unread

    sweep = resolve_sweep(job, site, rows)
    warn_of_unread(job, rows)
    return sweep


def parents_of(after: Sequence[str], job: ResolvedJob, runs: Path) -> Sequence[Parent]:
    """Return the runs that a job follows."""
    if not after:
        return ()
    from toolkit.submission.chain import find_parents

    return find_parents(after, job, runs)


def _make(planned: _Planned, request: JobRequest, *, instead: str) -> RunDirectory:
    """Make the run directory with its script, once preflight has passed; report the cost at the end."""
    cost = require_good(
        look(planned.job, planned.runs, site=planned.site, extra_sbatch_options=planned.sbatch_options), instead=instead
    )
    run = make_run(
        planned.job, planned.runs, extra_sbatch_options=planned.sbatch_options, sweep=planned.sweep,
        after=planned.parents, calls=request.calls,
    )  # fmt: skip
    report_cost(cost)
    return run

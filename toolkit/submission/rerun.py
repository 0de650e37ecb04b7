"""Rerun: a new run from another one's record, with its configuration, its code and its data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from toolkit.config.amend import amend_job, move_job
from toolkit.config.document import Flag
from toolkit.config.request import from_command_line, site_of_record
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.sweep import read_sweep
from toolkit.runs.record.job import first_job
from toolkit.submission.sweep.sweep import ResolvedSweep, resolve_again

__all__ = ["job_to_repeat", "sweep_to_repeat"]


def job_to_repeat(
    run: RunDirectory,
    *,
    settings: Sequence[str] = (),
    flags: Mapping[str, Flag] | None = None,
    site: Site | None = None,
) -> ResolvedJob:
    """Return the job of a run as it was first submitted, with the changes that are named here.

    What the site said then holds, whatever its file says now; another `site` is taken as it is now. A task of an array
    is repeated as an array of that task alone.

    Raises:
        ToolkitError: a value is wrong, or the site cannot serve it.
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
        ToolkitError: a task is wrong with what is named anew.
    """
    sweep = read_sweep(run.whole)
    return resolve_again(job, site or site_of_record(job), sweep) if sweep is not None else None


def _check_partition(recorded: ResolvedJob, settings: Sequence[str], flags: Mapping[str, Flag]) -> None:
    """Refuse another partition: a record has the limits of one partition only."""
    asked = {one.path: one for one in from_command_line(settings, flags)}.get(("job", "partition"))
    if asked is not None and recorded.partition_limits is not None and asked.value != recorded.job.partition:
        raise ToolkitError(
            f"the record knows partition {recorded.job.partition} alone",
            where=asked.origin.detail,
            fix=f"add --site {recorded.site.name}: it takes the site as its file says now",
        )

"""A run by the name that the user gave it, and the folder of all runs."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.rundir.find import NoRunError, find_run, runs_folder
from toolkit.rundir.layout import RunDirectory

__all__ = ["find_named", "runs_of_site", "site_runs"]


def site_runs(runs: Path | None) -> Path:
    """Return RUNS for commands on existing runs: --runs > TOOLKIT_RUNS > the site's > ./runs."""
    is_named = runs is not None or os.environ.get("TOOLKIT_RUNS")
    return runs_folder(runs, os.environ, "" if is_named else runs_of_site())


def runs_of_site() -> str:
    """Return RUNS of the detected site; "" if the site names none."""
    from toolkit.config.layers import expand_path  # heavy, and mostly not needed
    from toolkit.site.detect import detect_site

    try:
        site = detect_site().site
    except ToolkitError:  # no site is known here; the runs in this folder can still be read
        return ""
    return expand_path(site, "runs", os.environ)


def find_named(run: str, folder: Path) -> RunDirectory:
    """Return the run, or the task, that a name such as `last`, a run id or a Slurm job id means.

    Raises:
        NotFoundError: there is no such run or task.
    """
    try:
        found = RunDirectory(find_run(run, folder))
    except NoRunError as error:
        from toolkit.runs.status.unknown_names import known_otherwise

        raise known_otherwise(run, folder) or error from None
    if found.task_number is not None:
        from toolkit.runs.status.state import require_task

        require_task(found)
    return found

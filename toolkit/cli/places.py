"""Where runs are: the folder RUNS, and a run by its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.rundir.layout import RunDirectory


def site_runs(runs: Path | None) -> Path:
    """RUNS for commands that follow runs: --runs > TOOLKIT_RUNS > the site's > ./runs."""
    from toolkit.rundir.find import runs_folder

    named = runs is not None or os.environ.get("TOOLKIT_RUNS")
    return runs_folder(runs, os.environ, "" if named else runs_of_site())


def runs_of_site() -> str:
    """RUNS of the site that this is; "" where it names none."""
    from toolkit.config.expand import expand_path
    from toolkit.errors import ToolkitError
    from toolkit.site.detect import detect_site

    try:
        site = detect_site().site
    except ToolkitError:  # no site is known here; the runs in this folder can still be followed
        return ""
    return expand_path(site, "runs", os.environ)


def folder_of_runs(named: Path | None) -> Path:
    """RUNS. One that --runs names must be there; the others come with the first run."""
    from toolkit.errors import NotFoundError

    folder = site_runs(named)
    if named is not None and not folder.is_dir():
        raise NotFoundError("there is no such folder", where=str(folder), fix="name the folder of all runs with --runs")
    return folder


def find(run: str, runs: Path | None, *, to: str = "") -> RunDirectory:
    """The run directory that RUN names. A verb, `to`="cancel", is not for what names less than a run or a task."""
    from toolkit.rundir.find import NoRunError, find_run
    from toolkit.rundir.layout import RunDirectory
    from toolkit.rundir.run_names import refuse_part

    if to:
        refuse_part(run, to)
    folder = site_runs(runs)
    try:
        found = RunDirectory(find_run(run, folder))
    except NoRunError as error:
        from toolkit.runs.status.unknown_names import known_otherwise

        raise known_otherwise(run, folder) or error from None
    if found.task_number is not None:
        from toolkit.runs.status.state import require_task

        require_task(found)
    return found

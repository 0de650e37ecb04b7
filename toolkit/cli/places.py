"""Where runs are: the folder RUNS, and a run by its name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.rundir.layout import RunDirectory


def site_runs(runs: Path | None) -> Path:
    """Return RUNS for commands on existing runs: --runs > TOOLKIT_RUNS > the site's > ./runs."""
    from toolkit.submission.named_run import site_runs as folder

    return folder(runs)


def runs_of_site() -> str:
    """Return RUNS of the detected site; "" if the site names none."""
    from toolkit.submission.named_run import runs_of_site as folder

    return folder()


def folder_of_runs(named: Path | None) -> Path:
    """RUNS. One that --runs names must be there; the others come with the first run."""
    from toolkit.errors import NotFoundError

    folder = site_runs(named)
    if named is not None and not folder.is_dir():
        raise NotFoundError("there is no such folder", where=str(folder), fix="name the folder of all runs with --runs")
    return folder


def find(run: str, runs: Path | None, *, to: str = "") -> RunDirectory:
    """The run directory that RUN names. A verb, `to`="cancel", is not for what names less than a run or a task."""
    from toolkit.rundir.run_names import refuse_part
    from toolkit.submission.named_run import find_named

    if to:
        refuse_part(run, to)
    return find_named(run, site_runs(runs))

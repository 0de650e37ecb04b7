"""Find the folder of all runs and the runs that a user names, and run an action on several of them."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from toolkit.errors import NotFoundError, ToolkitError, all_of
from toolkit.rundir.files import permissions_in_words, runs_folder
from toolkit.rundir.find import NoRunError, find_run, refuse_part
from toolkit.rundir.layout import RunDirectory

__all__ = ["find", "find_named", "folder_of_runs", "for_each", "refuse_at_last", "runs_of_site", "site_runs"]

Result = TypeVar("Result")


def site_runs(runs: Path | None) -> Path:
    """Return RUNS for commands on existing runs: --runs > TOOLKIT_RUNS > the site's > ./runs."""
    is_named = runs is not None or os.environ.get("TOOLKIT_RUNS")
    return runs_folder(runs, os.environ, "" if is_named else runs_of_site())


def runs_of_site() -> str:
    """Return RUNS of the detected site; "" if the site names none."""
    from toolkit.config.request import expand_path  # imported here because the import is slow and rarely needed
    from toolkit.site.load import detect_site

    try:
        site = detect_site().site
    except ToolkitError:  # no site is detected, so ./runs is used
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


def folder_of_runs(named: Path | None) -> Path:
    """Return RUNS. `--runs` must exist; other folders are created by the first run."""
    folder = site_runs(named)
    if named is not None and not folder.is_dir():
        raise NotFoundError("runs folder not found", where=str(folder), fix="pass an existing folder with --runs")
    return folder


def find(run: str, runs: Path | None, *, to: str = "") -> RunDirectory:
    """Return the run directory that RUN names. A verb such as `to="cancel"` refuses parts of a run or task."""
    if to:
        refuse_part(run, to)
    return find_named(run, site_runs(runs))


def for_each(names: Iterable[str], do: Callable[[str], Result]) -> tuple[list[Result], list[ToolkitError]]:
    """Return the results of `do` for each distinct name, and the errors of the names that it refused.

    Raises:
        OSError: stdout was closed, as by `| head -1`; raised after all names were processed.
    """
    results: list[Result] = []
    refused: list[ToolkitError] = []
    stdout_error: OSError | None = None
    for name in dict.fromkeys(names):
        try:
            with permissions_in_words():
                results.append(do(name))
        except ToolkitError as error:
            refused.append(error)
        except OSError as error:
            if error.filename is not None:  # errors of writes to stdout name no file
                raise
            stdout_error = error
    if stdout_error is not None:
        raise stdout_error
    return results, refused


def refuse_at_last(refused: Sequence[ToolkitError]) -> None:
    """Raise the collected errors, if any, after all names were processed.

    Raises:
        ToolkitError: the first error, with the others attached.
    """
    if refused:
        raise all_of(refused)

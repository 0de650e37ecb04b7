"""Find the folder of all runs and the runs that a user names, and run an action on several of them."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from toolkit.errors import NotFoundError, ToolkitError, all_of, counted
from toolkit.rundir.files import permissions_in_words, runs_folder
from toolkit.rundir.find import NoRunError, find_run, parse_run_name, refuse_part
from toolkit.rundir.known_folders import known_folders
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.runs_of_job import newest_of_job, refuse_several_folders
from toolkit.terminal.talk import say

__all__ = [
    "find", "find_named", "folder_of_runs", "folders_of_runs", "for_each", "is_only_folder", "refuse_at_last",
    "runs_of_site", "site_runs",
]  # fmt: skip

_MOST_FOLDERS = 3  # the most known folders that a message lists

Result = TypeVar("Result")


def site_runs(runs: Path | None) -> Path:
    """Return RUNS for commands on existing runs: --runs > TOOLKIT_RUNS > the site's > ./runs."""
    return runs_folder(runs, os.environ, "" if is_only_folder(runs) else runs_of_site())


def is_only_folder(runs: Path | None) -> bool:
    """Return True if --runs or TOOLKIT_RUNS chooses RUNS; commands otherwise search the known folders, too."""
    return runs is not None or bool(os.environ.get("TOOLKIT_RUNS"))


def runs_of_site() -> str:
    """Return RUNS of the detected site; "" if the site names none."""
    from toolkit.config.request import expand_path  # imported here because the import is slow and rarely needed
    from toolkit.site.load import detect_site

    try:
        site = detect_site().site
    except ToolkitError:  # no site is detected, so ./runs is used
        return ""
    return expand_path(site, "runs", os.environ)


def find_named(run: str, folder: Path, *, is_only: bool, changes: bool = False) -> RunDirectory:
    """Return the run, or the task, that a name such as `last`, a run id, a Slurm job id or the name of a job means.

    A run in `folder` takes precedence over those in known folders, which are searched unless `is_only`. The name of a job
    means its newest run; if the caller `changes` the run, at most one run of that name may be unfinished.

    Raises:
        NotFoundError: there is no such run or task.
        ToolkitError: the name is ambiguous.
    """
    try:
        found = RunDirectory(find_run(run, folder))
    except NoRunError as error:
        from toolkit.runs.status.unknown_names import known_otherwise

        others = [] if is_only else known_folders(folder)
        elsewhere = _find_in_known(run, others) or newest_of_job(run, [folder, *others], changes=changes)
        if elsewhere is None:
            error.message += f"; also searched {counted(len(others), 'known folder')}" if others else ""
            raise known_otherwise(run, folder) or error from None
        found = RunDirectory(elsewhere)
    if found.task_number is not None:
        from toolkit.runs.status.state import require_task

        require_task(found)
    return found


def _find_in_known(run: str, folders: Sequence[Path]) -> Path | None:
    """Return the run that a name means in the only folder that has it; `last` is the newest one of all folders."""
    name = parse_run_name(run)
    is_last = name is not None and name.run == "last"
    found = {}
    for folder in folders:
        with suppress(NotFoundError if is_last else NoRunError):
            found[folder] = find_run("last" if is_last else run, folder)
    if is_last and found:
        newest = max(found, key=lambda folder: found[folder].name)
        say(f"last is {found[newest].name} of {found[newest].parent.name} in {newest}")
        return find_run(run, newest)
    refuse_several_folders(run, list(found.values()))
    return next(iter(found.values()), None)


def folder_of_runs(named: Path | None) -> Path:
    """Return RUNS. `--runs` must exist; other folders are created by the first run."""
    folder = site_runs(named)
    if named is not None and not folder.is_dir():
        raise NotFoundError("runs folder not found", where=str(folder), fix="pass an existing folder with --runs")
    return folder


def folders_of_runs(named: Path | None) -> list[Path]:
    """Return RUNS and, unless the user chose it, the known folders; reports them."""
    present = folder_of_runs(named)
    if is_only_folder(named) or not (known := known_folders(present)):
        return [present]
    folders = [present, *known] if present.is_dir() else known
    listed = ", ".join(map(str, folders[:_MOST_FOLDERS])) + (", ..." if len(folders) > _MOST_FOLDERS else "")
    say(f"runs in {listed}; --runs selects one folder" if len(folders) > 1 else f"runs in {listed}")
    return folders


def find(run: str, runs: Path | None, *, to: str = "", changes: bool = False) -> RunDirectory:
    """Return the run directory that RUN names. A verb such as `to="cancel"` refuses parts of a run or task.

    With a verb or `changes`, the name of a job refuses several unfinished runs.
    """
    if to:
        refuse_part(run, to)
    return find_named(run, site_runs(runs), is_only=is_only_folder(runs), changes=changes or bool(to))


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

"""Where runs are: the folder RUNS, and a run by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from toolkit.errors import ToolkitError, all_of
from toolkit.rundir.files import permissions_in_words

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
    from toolkit.rundir.find import refuse_part
    from toolkit.submission.named_run import find_named

    if to:
        refuse_part(run, to)
    return find_named(run, site_runs(runs))


Result = TypeVar("Result")


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
            if error.filename is not None:  # a file's
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

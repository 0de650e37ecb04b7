"""Find the newest run of a job by the job's name."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from toolkit.errors import ToolkitError, counted
from toolkit.rundir.find import MOST_ALIKE, has_begun, has_ended
from toolkit.rundir.known import known_runs
from toolkit.rundir.layout import RunDirectory
from toolkit.terminal.talk import say

__all__ = ["newest_of_job"]


def newest_of_job(name: str, folders: Iterable[Path], *, changes: bool) -> Path | None:
    """Return the newest submitted run of the job `name`, in the first folder that has one; None if there is none.

    Raises:
        ToolkitError: the caller `changes` the run, and several runs of that name are unfinished.
    """
    for folder in folders:
        with known_runs(folder) as known:
            found = [run for run in known.with_prefix("", job=name) if has_begun(run)] if "/" not in name else []
        if not found:
            continue
        if changes:
            _refuse_several(name, found)
        if len(found) > 1:
            say(f"{name} is {found[0].run_id}, the newest of {len(found)} runs")
        return found[0].path
    return None


def _refuse_several(name: str, runs: Iterable[RunDirectory]) -> None:
    from toolkit.runs.status.state import run_statuses

    statuses = run_statuses(run for run in runs if not has_ended(run))
    # A run with a damaged file may still be running.
    active = {
        run.run_id: "damaged" if isinstance(one, ToolkitError) else one.state.value
        for run, one in statuses.items()
        if isinstance(one, ToolkitError) or not one.state.final
    }
    if len(active) > 1:
        each = ", ".join(f"{run_id} ({state})" for run_id, state in islice(active.items(), MOST_ALIKE))
        raise ToolkitError(
            f"{counted(len(active), 'run')} of this name are unfinished",
            where=name,
            fix=f"choose one by its run id: {each}",
        )

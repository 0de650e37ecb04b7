"""Find the newest run of a job by the job's name."""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from toolkit.errors import ToolkitError, counted
from toolkit.rundir.find import MOST_ALIKE, MOST_NAMED, has_begun, has_ended
from toolkit.rundir.known import known_runs
from toolkit.rundir.layout import RunDirectory
from toolkit.terminal.talk import say

__all__ = ["newest_of_job", "refuse_several_folders"]


def newest_of_job(name: str, folders: Sequence[Path], *, changes: bool) -> Path | None:
    """Return the newest submitted run of the job `name`: in the first folder, else in the only other one that has one; None if there is none.

    Raises:
        ToolkitError: several of the other folders have one, or the caller `changes` the run and several are unfinished.
    """
    found: list[RunDirectory] = []
    for folder in folders if "/" not in name else ():
        with known_runs(folder) as known:
            begun = (run for run in known.with_prefix("", job=name) if has_begun(run))
            found += islice(begun, None if changes else 2)
        if found and folder == folders[0]:
            break
    found.sort(key=lambda run: run.run_id, reverse=True)
    if changes:
        _refuse_several(name, found)
    refuse_several_folders(name, list({run.path.parents[1]: run.path for run in reversed(found)}.values()))
    if len(found) > 1:
        say(f"{name} is {found[0].run_id}, its newest run")
    return found[0].path if found else None


def refuse_several_folders(name: str, paths: Sequence[Path]) -> None:
    """Raise ToolkitError if a name means several runs, each in a folder of its own."""
    if len(paths) > 1:
        each = ", ".join(map(str, paths[:MOST_NAMED]))
        raise ToolkitError(f"runs in {len(paths)} folders match", where=name, fix=f"choose one by its path: {each}")


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

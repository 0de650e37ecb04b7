"""Find unused files below RUNS: runs that never started, remains of interrupted saves, and old runs.

Files are kept if their run has not ended or its state is unknown, if another run continues from it, or if they changed
within the last hour.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from toolkit.checkpoint.format.layout import aside_of
from toolkit.errors import NotFoundError, SchedulerRefusedError, ToolkitError, counted
from toolkit.rundir.files import read_json
from toolkit.rundir.find import listed, run_named
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.runs.history.listing import list_runs
from toolkit.runs.record.job import recorded_job, slurm_of, uses_slurm
from toolkit.runs.status.state import run_status
from toolkit.slurm.submit import find_by_token, token_of
from toolkit.terminal.talk import say

__all__ = ["Leftover", "find_leftovers", "remove"]

QUIET_S = 3600.0
# A folder gets this prefix before its removal, so that no command reads a partly removed run.
REMOVING = ".removing-"
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
_OF_SAVES = {
    "part": "an interrupted save",
    "stale": "an abandoned save",
    "removed": "a partly deleted checkpoint",
    "bad": "a damaged checkpoint",
}


@dataclass(frozen=True)
class Leftover:
    """A removable folder, its run, and the reason."""

    path: Path
    run_id: str
    why: str
    size_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def find_leftovers(
    runs: Path, *, older_than: timedelta | None = None, keep_checkpoints: bool = False
) -> list[Leftover]:
    """Return the removable folders, those of the newest run first.

    `older_than` adds whole runs without changes for that long; `keep_checkpoints` excludes runs that have a checkpoint.
    """
    found = [*_half_made(runs), *_half_removed(runs)]
    old, unknown, young = [], [], 0
    for status in list_runs([runs]):
        run = RunDirectory(Path(status.path))
        if not os.access(run.path, os.R_OK | os.W_OK | os.X_OK):
            continue  # the folder belongs to another user
        quiet_s = _quiet_s(run)
        if quiet_s < QUIET_S:
            young += older_than is not None and status.state.final and quiet_s > older_than.total_seconds()
            continue
        if status.state is RunState.CREATED:
            never = _never_started(run)
            if never:
                found.append(_leftover(run.path, run.run_id, "created, but never started"))
            elif never is None:
                unknown.append(run.run_id)
        elif status.state is RunState.UNKNOWN:
            unknown.append(run.run_id)
        elif status.state.final and older_than is not None and _quiet_s(run) > older_than.total_seconds():
            old.append((run, status))
        elif status.state.final:
            found += _of_saves(run)
    chosen = [(run, status) for run, status in old if not (keep_checkpoints and _has_checkpoint(run))]
    needed = _needed_by_others(runs, {run.run_id for run, _ in chosen}) if chosen else frozenset()
    for run, status in old:
        if (run, status) in chosen and run.run_id not in needed:
            days = _quiet_s(run) / 86400
            found.append(_leftover(run.path, run.run_id, f"{status.state.value} {days:.0f} days ago"))
        else:
            found += _of_saves(run)
    if young:
        say(f"kept, because they changed within the last hour: {counted(young, 'run')} that ended")
    if unknown:
        runs_in_words = counted(len(unknown), "run")
        say(f"kept, because Slurm does not report its state: {runs_in_words}, such as {unknown[0]}")
    return sorted(found, key=lambda one: one.run_id, reverse=True)


def remove(leftover: Leftover) -> None:
    """Remove a folder, unless its run has been resumed.

    Raises:
        ToolkitError: the run has been resumed, or the files cannot be removed.
    """
    run = RunDirectory(leftover.path)
    is_run = run.record.exists()
    if is_run:
        _refuse_living(run)
    try:
        gone = leftover.path.with_name(f"{REMOVING}{leftover.path.name.removeprefix(REMOVING)}")
        leftover.path.rename(gone)
        shutil.rmtree(gone)
        if is_run:
            run.revived_marker.unlink(missing_ok=True)
            with suppress(OSError):  # raised if the job folder contains other runs
                run.path.parent.rmdir()
    except FileNotFoundError:
        return  # another process has removed the folder
    except OSError as error:
        raise ToolkitError(
            f"cannot be removed: {error.strerror}", where=str(error.filename), fix="ask the owner to remove it"
        ) from error


def _refuse_living(run: RunDirectory) -> None:
    status = run_status(run)
    if not status.state.final and not (status.state is RunState.CREATED and _never_started(run)):
        raise ToolkitError(f"the run is {status.state.value} again, so it is not removed", where=str(run.path))


def _half_made(runs: Path) -> Iterator[Leftover]:
    """Yield the folders of interrupted submissions, which have no record and were never started."""
    for name in listed(runs):
        run = run_named(runs, name)
        if not _RUN_ID.fullmatch(name.run_id) or run.may_be_run() or _quiet_s(run) < QUIET_S:
            continue
        if not run.start_numbers() and not run.attempt_numbers():
            yield _leftover(run.path, name.run_id, "its creation was interrupted")


def _half_removed(runs: Path) -> Iterator[Leftover]:
    for path in runs.glob(f"*/{REMOVING}*"):
        yield _leftover(path, path.name.removeprefix(REMOVING), "its removal was interrupted")


def _never_started(run: RunDirectory) -> bool | None:
    """Return whether the run has no job, not even one that the user submitted; None if Slurm does not respond."""
    job = recorded_job(run)
    if not uses_slurm(job):
        return True
    try:
        return find_by_token(slurm_of(job), token_of(run.run_id, 0)) is None
    except (SchedulerRefusedError, NotFoundError):
        return None


def _of_saves(run: RunDirectory) -> Iterator[Leftover]:
    for part in run.with_tasks():
        for folder in sorted(part.checkpoints.glob("step-*.*")):
            aside = aside_of(folder)
            if aside is not None and aside[1] in _OF_SAVES and time.time() - _changed(folder) > QUIET_S:
                yield _leftover(folder, run.run_id, _OF_SAVES[aside[1]])


def _has_checkpoint(run: RunDirectory) -> bool:
    return any(part.committed_checkpoints() for part in run.with_tasks())


def _needed_by_others(runs: Path, going: set[str]) -> frozenset[str]:
    """Return the runs in `going` that a remaining run continues from, directly or through other runs."""
    names = {name.run_id: _named_in(run_named(runs, name)) for name in listed(runs)}
    needed: set[str] = set()
    stays = names.keys() - going
    while stays:
        named = set().union(*(names[run_id] for run_id in stays))
        stays = (named & going) - needed
        needed |= stays
    return frozenset(needed)


def _named_in(run: RunDirectory) -> set[str]:
    """Return the run ids in the records of a run, except those in its code changes and environment."""
    found: set[str] = set()
    for path in (run.record, *run.path.glob("resumed-*.json")):
        try:
            record = read_json(path)
        except (FileNotFoundError, ToolkitError):
            continue  # the record is missing, or damaged, which `status` reports
        kept = {key: value for key, value in record.items() if key not in ("code", "environment")}
        found |= set(_RUN_ID.findall(json.dumps(kept)))
    return found - {run.run_id}


def _quiet_s(run: RunDirectory) -> float:
    """Return the seconds since the last change in the folders of a run, including its last attempts and checkpoints."""
    folders = []
    for part in run.with_tasks():
        attempt = part.last_attempt()
        folders += [part.path, part.attempts, part.starts, part.control, part.checkpoints]
        folders += [attempt.path, attempt.heartbeat] if attempt is not None else []
    return time.time() - max(map(_changed, folders))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _leftover(path: Path, run_id: str, why: str) -> Leftover:
    return Leftover(path, run_id, why, _size_bytes(path))


def _size_bytes(folder: Path) -> int:
    """Return the size of all files in a folder; files that vanish meanwhile do not count."""
    size = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):
                size += Path(place, name).lstat().st_size
    return size

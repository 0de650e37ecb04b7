"""List the runs in folders of runs, the newest first, with one query per cluster for all that have not ended."""

import json
import time
import zlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, counted
from toolkit.metrics.validation import ValidationRecord
from toolkit.rundir.files import not_permitted
from toolkit.rundir.find import has_begun, run_named
from toolkit.rundir.index import PAGE, Ended, Entry, RunIndex, RunName
from toolkit.rundir.jobs import job_ids
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.runs.status.state_table import RECORD_SOURCE, RunStatus, TaskStatus
from toolkit.terminal.talk import say

__all__ = ["list_runs", "unfinished_runs"]

# A cache entry of another version may lack fields of this one and is discarded.
_FORM = zlib.crc32(
    repr([[one.name for one in fields(kind)] for kind in (RunStatus, TaskStatus, ValidationRecord)]).encode()
)
_NAMES = ("run_id", "job_name", "path")  # known from the folders; the cached path is outdated if RUNS was moved


def status_of(runs: Path, kept: Entry) -> RunStatus | None:
    """Return the cached status; None if there is none, if the run has changed since, or if it cannot be read."""
    name = kept.name
    path = runs / name.job_name / name.run_id
    try:
        if not kept.state or changed_ns(path) != kept.changed_ns:
            return None
    except PermissionError:  # this user can no longer read the run
        return None
    try:
        kept_status = json.loads(kept.message)
        if kept_status.pop("form") != _FORM:
            return None
        tasks, validation = kept_status.pop("tasks"), kept_status.pop("validation")
        return RunStatus(
            run_id=name.run_id, job_name=name.job_name, path=str(path), state=RunState(kept.state),
            tasks=None if tasks is None else tuple(_task(task) for task in tasks),
            validation=None if validation is None else ValidationRecord(**validation), **kept_status,
        )  # fmt: skip
    except (ValueError, TypeError, KeyError):
        return None


def changed_ns(path: Path) -> int:
    """Return the newest modification time, in ns, of the folders that another start would change."""
    run = RunDirectory(path)
    parts = run.with_tasks()
    return max(_modified_ns(folder) for part in parts for folder in (part.path, part.attempts))


def _modified_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def end_of(status: RunStatus, changed_ns: int) -> Ended | None:
    """Return the cache entry of a run; None unless its end is final. `changed_ns` is from before the run was read."""
    if not _is_for_good(status):
        return None
    return Ended(RunName(status.run_id, status.job_name), status.state.value, changed_ns, _kept_status(status))


def _is_for_good(status: RunStatus) -> bool:
    """Return whether the run's own files state its end; an end known only from Slurm may still be replaced by them."""
    if not status.state.final:
        return False
    if status.tasks is not None:
        return all(task.source == RECORD_SOURCE for task in status.tasks)
    never_began = status.state is RunState.CANCELLED and not status.starts
    return status.source == RECORD_SOURCE or never_began


def _kept_status(status: RunStatus) -> str:
    kept_status = {
        one.name: getattr(status, one.name) for one in fields(RunStatus) if one.name not in (*_NAMES, "state")
    }
    if status.validation is not None:
        kept_status["validation"] = asdict(status.validation)
    if status.tasks is not None:
        kept_status["tasks"] = [
            {one.name: getattr(task, one.name) for one in fields(TaskStatus)} for task in status.tasks
        ]
    return json.dumps({"form": _FORM, **kept_status}, ensure_ascii=False)


def _task(kept_status: dict[str, Any]) -> TaskStatus:
    return TaskStatus(**{**kept_status, "state": RunState(kept_status["state"])})


SLOW_S = 1.0  # a search that takes longer is reported


def list_runs(
    folders: Sequence[Path], *, job: str = "", states: Collection[RunState] = (), since: str = "", limit: int = 0
) -> list[RunStatus]:
    """Return the status of each run in folders of runs, newest first.

    `job` filters by job name, `states` by state, `since` by run id, which begins with the UTC time; `limit` 0 lists
    all. Runs that have ended are cached; each cluster is queried once for the others.
    """
    words = [state.value for state in states] if states else None
    with ExitStack() as stack:
        walks = [
            _Walk(stack.enter_context(closing(RunIndex(folder))), frozenset(states or RunState), limit)
            for folder in folders
        ]
        for walk in walks:
            walk.over(walk.index.newest(job=job, since=since, states=words, first=limit or PAGE))
        asked = _ask([run for walk in walks for run in walk.undetermined])
        for walk in walks:
            keep(
                walk.index,
                ((one, changed) for one in asked if (changed := walk.changed.get(Path(one.path))) is not None),
            )
    found = [one for walk in walks for one in walk.determined]
    found += [one for one in asked if one.state in frozenset(states or RunState)]
    found.sort(key=lambda status: status.job_name)
    found.sort(key=lambda status: status.run_id, reverse=True)
    return found[:limit] if limit else found


def unfinished_runs(folders: Sequence[Path]) -> list[RunStatus]:
    """Return the status of each submitted run that has not ended, newest first."""
    living = {state for state in RunState if not state.final}
    begun = list_runs(folders, states=living)
    return [status for status in begun if _has_begun(RunDirectory(Path(status.path)))]


def _has_begun(run: RunDirectory) -> bool:
    try:
        return has_begun(run)
    except PermissionError:  # the run belongs to another user
        return False


@dataclass
class _Walk:
    """A search from the newest run to the oldest, until `limit` runs in one of `states` are found.

    `determined` are runs whose files determine their state; Slurm is queried for the `undetermined` ones. `changed` is
    the time of the last change of each run.
    """

    index: RunIndex
    states: frozenset[RunState]
    limit: int
    determined: list[RunStatus] = field(default_factory=list)
    undetermined: list[RunDirectory] = field(default_factory=list)
    changed: dict[Path, int] = field(default_factory=dict)
    read: int = 0

    def over(self, pages: Iterable[Sequence[Entry]]) -> None:
        began, is_reported, looked = time.monotonic(), False, 0
        for page in pages:
            self._take(page)
            looked += len(page)
            if self._is_enough():
                break
            left = self.index.count() - looked
            if not is_reported and left > 0 and self.read and time.monotonic() - began > SLOW_S:
                are = "is" if left == 1 else "are"
                say(f"reading runs that the cache does not contain yet; {counted(left, 'run')} {are} left to check")
                is_reported = True
        if self.read and (taken_s := time.monotonic() - began) > SLOW_S:
            kept = f"; those that have ended are now cached in {self.index.path}" if self.index.path else ""
            say(f"{counted(self.read, 'run')} {'was' if self.read == 1 else 'were'} read in {taken_s:.1f} s{kept}")

    def _is_enough(self) -> bool:
        asks_for_all = len(self.states) == len(RunState)
        return bool(self.limit) and len(self.determined) + (len(self.undetermined) if asks_for_all else 0) >= self.limit

    def _take(self, page: Sequence[Entry]) -> None:
        fresh = []
        for entry in page:
            status = status_of(self.index.runs, entry)
            if status is None:
                status = self._read(run_named(self.index.runs, entry.name))
                fresh += [status] if status is not None else []
            if status is not None and status.state in self.states:
                self.determined.append(status)
        keep(self.index, ((status, self.changed.pop(Path(status.path), 0)) for status in fresh))

    def _read(self, run: RunDirectory) -> RunStatus | None:
        """Return the status that a run's own files determine; None if it may be running, or is not a run."""
        if not run.may_be_run():
            return None
        self.read += 1
        from toolkit.runs.status.damaged import unreadable
        from toolkit.runs.status.state import own_status

        try:
            self.changed[run.path] = changed_ns(run.path)
        except PermissionError as error:  # the run belongs to another user
            return unreadable(run, not_permitted(error))
        try:
            status = own_status(run)
        except ToolkitError as error:
            return unreadable(run, error)
        if status is None:
            self.undetermined.append(run)
        return status


def _ask(runs: Sequence[RunDirectory]) -> list[RunStatus]:
    if not runs:
        return []
    from toolkit.runs.status.damaged import unreadable
    from toolkit.runs.status.state import run_statuses

    statuses = run_statuses(runs)
    return [unreadable(run, one) if isinstance(one, ToolkitError) else one for run, one in statuses.items()]


def keep(index: RunIndex, found: Iterable[tuple[RunStatus, int]]) -> None:
    """Cache runs with a final end, each with `changed_ns` from before it was read, and their jobs."""
    ended = [end for status, changed in found if (end := end_of(status, changed)) is not None]
    if ended:
        index.keep(ended)
        index.keep_jobs((end.name, job_ids(run_named(index.runs, end.name))) for end in ended)

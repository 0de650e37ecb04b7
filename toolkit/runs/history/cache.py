"""How runs ended, as the index of RUNS remembers it. Only what no clock and no Slurm can change is kept."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from toolkit.metrics.validation import ValidationRecord
from toolkit.rundir.index import Ended, Entry, RunName
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.runs.status.state_table import RECORD_SOURCE, RunStatus, TaskStatus

# What another version of the toolkit remembered may lack something that this one tells: it is read anew.
_FORM = zlib.crc32(
    repr([[one.name for one in fields(kind)] for kind in (RunStatus, TaskStatus, ValidationRecord)]).encode()
)
_NAMES = ("run_id", "job_name", "path")  # known without the index, and RUNS may have moved since


def status_of(runs: Path, kept: Entry) -> RunStatus | None:
    """The status that is remembered; None where none is, the run changed since, or it cannot be read."""
    name = kept.name
    path = runs / name.job_name / name.run_id
    try:
        if not kept.state or changed_ns(path) != kept.changed_ns:
            return None
    except PermissionError:  # it was closed to this user since
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
    """When the newest thing was put into the folders of a run in which a later life of it shows."""
    run = RunDirectory(path)
    parts = run.with_tasks()
    return max(_modified_ns(folder) for part in parts for folder in (part.path, part.attempts))


def _modified_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def end_of(status: RunStatus, changed_ns: int) -> Ended | None:
    """What is to be remembered of a run, with `changed_ns` of before it was read; None of one that may go on."""
    if not _is_for_good(status):
        return None
    return Ended(RunName(status.run_id, status.job_name), status.state.value, changed_ns, _kept_status(status))


def _is_for_good(status: RunStatus) -> bool:
    """True where the run's own files tell its end: Slurm's word on a run may still be outdone by the run's own."""
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

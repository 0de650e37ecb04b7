"""An array that Slurm runs in several parts, since its task numbers exceed the limit of one array.

Slurm numbers the tasks of each part from 0; toolkit's numbers continue over all parts: task 1003 is number 3 of the part
that starts with task 1000.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.rundir.files import read_json_or_none, utc_now, write_json
from toolkit.rundir.layout import RunDirectory, start_of


@dataclass(frozen=True)
class Part:
    """Tasks `first` to `last` are the numbers from 0 of the Slurm array `job_id`."""

    job_id: str
    first: int
    last: int

    def __contains__(self, task: int) -> bool:
        return self.first <= task <= self.last


def record_of_parts(parts: Sequence[Part]) -> dict[str, Any]:
    """The parts as recorded in `submitted-SSS.json`; empty for an array in one piece."""
    return {"parts": [asdict(part) for part in parts]} if parts else {}


def parts_in(record: Mapping[str, Any]) -> list[Part]:
    """The parts that `submitted-SSS.json` or `submitting-SSS.json` names; [] for an array in one piece."""
    return [Part(str(one["job_id"]), int(one["first"]), int(one["last"])) for one in record.get("parts", [])]


def newest_parts(run: RunDirectory) -> list[Part]:
    """The parts of a run's newest submission; [] for an array in one piece, and without an array."""
    newest = max(run.whole.path.glob("submitted-*.json"), key=start_of, default=None)
    return parts_in((read_json_or_none(newest) or {}) if newest is not None else {})


def all_parts(run: RunDirectory) -> list[Part]:
    """The parts of every submission of a run."""
    records = (read_json_or_none(path) or {} for path in run.whole.path.glob("submitted-*.json"))
    return [part for record in records for part in parts_in(record)]


def slurm_id(parts: Sequence[Part], array_job: str, task: int) -> str:
    """Slurm's id of a task."""
    part = next((part for part in parts if task in part), None)
    return f"{part.job_id}_{task - part.first}" if part is not None else f"{array_job}_{task}"


def task_of(parts: Sequence[Part], array_job: str, number: int) -> int:
    """Toolkit's number of the task that Slurm calls `ARRAY_JOB_NUMBER`."""
    return next((part.first + number for part in parts if part.job_id == array_job), number)


def write_submission(run: RunDirectory, start: int, job_id: str, parts: Sequence[Part] = ()) -> None:
    """Record in `submitted-SSS.json` that a start of a run, or of a task, is a job of Slurm, or of this host.

    `parts` are those of an array that Slurm has in several.
    """
    record = {"job_id": job_id, "start": start, "time": utc_now(), **record_of_parts(parts)}
    write_json(run.submitted(start), record)


def open_submission(
    run: RunDirectory, start: int, token: str, *, process_started: int, parts: Sequence[Part] = ()
) -> Path:
    """Record that this process is about to call sbatch for a start; the process that gets the answer removes the file.

    `process_started` is the kernel's start time of this process, in clock ticks since boot; `parts` are those of the
    planned array, without job ids.
    """
    path = run.submitting(start)
    record = {
        "start": start, "token": token, "host": socket.gethostname(), "pid": os.getpid(),
        "process_started": process_started, "time": utc_now(), **record_of_parts(parts),
    }  # fmt: skip
    write_json(path, record)
    return path

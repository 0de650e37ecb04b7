"""Submissions: the record before sbatch is called for a start, so that an interrupted submission can be reconciled."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from toolkit.rundir.files import utc_now, write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.parts import Part, record_of_parts


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

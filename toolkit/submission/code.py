"""The code of a run: a copy of the job's folder, or the copy of the run that is repeated."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from toolkit.config.entry import check_entry, files_of_entry
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import CheckFailedError
from toolkit.rundir.bad_nodes import runs_of
from toolkit.rundir.files import read_json
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.record.code_snapshot import (
    Snapshot,
    check_out,
    code_state,
    differences,
    list_of,
    read_snapshot,
    remove_snapshot,
    repeat_snapshot,
    take_snapshot,
)
from toolkit.talk import say

__all__ = ["NewCode", "is_rerun", "keep_code", "repeat_code"]

MOST_TOLD = 5  # names of files in one line


def keep_code(job: ResolvedJob, run: RunDirectory, runs: Path) -> tuple[ResolvedJob, dict[str, Any]]:
    """Copy the code of a new run, and return the job that starts from it and the record of the code.

    Raises:
        ToolkitError: the job wants one, and its folder holds too much.
    """
    snapshot = take_snapshot(job, run.code(0), runs)
    if isinstance(snapshot, Snapshot):
        job = job.model_copy(update={"code_directory": run.code(0)})
    return job, recorded_code(job, snapshot)


def recorded_code(job: ResolvedJob, snapshot: Snapshot | str) -> dict[str, Any]:
    """Return the record of the job's repository and of the copy of its folder, or why there is no copy."""
    state = code_state(job.job_directory)
    if isinstance(snapshot, str):
        return state | {"snapshot_left_out": snapshot}
    assert job.code_directory is not None
    return state | {"snapshot": snapshot.summary(job.code_directory.name)}


def repeat_code(job: ResolvedJob, run: RunDirectory, before: RunDirectory) -> tuple[ResolvedJob, dict[str, Any]]:
    """Give a new run the code of another run: its copy, else its commit and changes.

    Raises:
        CheckFailedError: neither exists any more; the fix is named.
    """
    code: dict[str, Any] = read_json(before.record)["code"]
    if list_of(before.code(0)).exists():
        repeat_snapshot(before.code(0), run.code(0))
        folder = run.code(0)
    elif not files_of_entry(job):
        return job, code  # a program or a package from elsewhere: its code is not in the folder
    elif "commit" in code:
        folder = check_out(job.job_directory, code, run.code(0))
    else:
        raise CheckFailedError(
            f"run {before.run_id} kept no copy of its code ({code.get('snapshot_left_out', 'none was taken')}), and its "
            "folder is in no repository",
            where=str(before.record),
            fix=f"`toolkit submit {job.job_file}` runs the code as it is now",
        )
    job = job.model_copy(update={"code_directory": folder})
    check_entry(job)
    return job, code


def is_rerun(run: RunDirectory) -> bool:
    """Return whether a run is a rerun, which keeps the code that it repeats when it is resumed."""
    return "rerun_of" in read_json(run.record)


class NewCode:
    """The copy of the job's folder for a start that a resume is about to claim, under a name of its own until then.

    `job` is the job that starts from it. One that has its code already, from an earlier start, keeps that.
    """

    def __init__(self, job: ResolvedJob, run: RunDirectory, start: int) -> None:
        self.folder = run.code(start)
        self.draft = self.folder.with_name(f".{self.folder.name}.{socket.gethostname()}.{os.getpid()}")
        self.job = job
        self.record: dict[str, Any] = {}
        if job.code_directory is not None:
            return
        try:
            snapshot = take_snapshot(job, self.draft, runs_of(run))
        except BaseException:
            self.discard()
            raise
        if isinstance(snapshot, Snapshot):
            self.job = job.model_copy(update={"code_directory": self.folder})
            _tell_edits(run, start, snapshot)
        self.record = recorded_code(self.job, snapshot)

    def put_in_place(self) -> None:
        """Rename the copy, once this resume has claimed the start."""
        if self.draft.exists():
            self.draft.rename(self.folder)
            list_of(self.draft).rename(list_of(self.folder))

    def discard(self) -> None:
        """Remove the copy, because another resume has claimed the start."""
        remove_snapshot(self.draft)


def _tell_edits(run: RunDirectory, start: int, snapshot: Snapshot) -> None:
    """Report the files that changed since the previous start."""
    copies = [copy for number in reversed(range(start)) if (copy := read_snapshot(run.code(number)))]
    edits = differences(copies[0], snapshot) if copies else {}
    if edits:
        told = [f"{name} was {what}" for name, what in list(edits.items())[:MOST_TOLD]]
        told += [f"and {len(edits) - MOST_TOLD} files more"] if len(edits) > MOST_TOLD else []
        say(
            f"since the last start {', '.join(told)}; start {start} runs the folder as it is now "
            "(--same-code: as it was)"
        )

"""The runs below RUNS as one looks for a run: the newest first, by name, or by a job id; from the index where it tells."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from toolkit.errors import DamagedFileError, ToolkitError
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.files import permissions_in_words
from toolkit.rundir.index import PAGE, RunIndex, RunName
from toolkit.rundir.jobs import job_ids, readable_job_ids
from toolkit.rundir.layout import RunDirectory
from toolkit.talk import say

FEW = 1000
SLOW_S = 1.0  # what takes longer is told
_MOST_TOLD = 3  # runs that cannot be read, each a line


class KnownRuns:
    """The runs of an index, iterated from the newest to the oldest."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index

    def __iter__(self) -> Iterator[RunDirectory]:
        for page in self.index.newest(first=10):
            for entry in page:
                run = self._run(entry.name)
                if may_be_run(run) and _can_be_read(run):
                    yield run

    def called(self, text: str) -> RunDirectory | None:
        """The run whose id is `RUNID`, or `JOB/RUNID` with the name of its job."""
        job, _, run_id = text.rpartition("/")
        return next((run for run in self.beginning(run_id, job=job) if run.run_id == run_id), None) if run_id else None

    def beginning(self, text: str, *, job: str = "") -> Iterator[RunDirectory]:
        """The runs whose ids begin so, the newest first."""
        for page in self.index.newest(beginning=text, job=job):
            for entry in page:
                run = self._run(entry.name)
                if may_be_run(run):
                    yield run

    def of_job(self, job_id: str) -> Iterator[RunDirectory]:
        """The runs that were a job, the newest first. Those that are over are looked into once, and then remembered."""
        remembered, unread = self.index.of_job(job_id), self.index.without_jobs()
        began, said = time.monotonic(), False
        found: list[tuple[RunName, list[str]]] = []
        unreadable: list[ToolkitError] = []
        try:
            for number, name in enumerate(dict.fromkeys(heapq.merge(remembered, unread, key=_age, reverse=True))):
                run = self._run(name)
                try:
                    with permissions_in_words():
                        ids = job_ids(run)
                except ToolkitError as error:  # one damaged run hides no other
                    if isinstance(error, DamagedFileError) and job_id in readable_job_ids(run):
                        yield run
                    else:
                        unreadable.append(error)
                    continue
                if ids and is_over(run):
                    found.append((name, ids))
                if job_id in ids and may_be_run(run):
                    yield run
                if len(found) >= PAGE:
                    self.index.keep_jobs(found)
                    found = []
                if not said and time.monotonic() - began > SLOW_S:
                    said = True
                    left = len(remembered) + len(unread) - number - 1
                    say(f"looking for job {job_id} in runs; {left} are left, once for all")
            for damage in unreadable[:_MOST_TOLD]:
                say(f"whether this run has job {job_id} is not known: {damage}")
        finally:
            if found:
                self.index.keep_jobs(found)

    def _run(self, name: RunName) -> RunDirectory:
        return RunDirectory(self.index.runs / name.job_name / name.run_id)


@contextmanager
def known_runs(runs: Path) -> Iterator[KnownRuns]:
    """The runs below a folder. Few of them are listed quicker than a file is made to remember them."""
    index = RunIndex(runs, make=False)
    if index.path is None and index.count() > FEW:
        index.close()
        index = RunIndex(runs)
    with closing(index):
        yield KnownRuns(index)


def may_be_run(run: RunDirectory) -> bool:
    """Whether a folder has a record; one that is closed to this user may have one."""
    try:
        return run.record.exists()
    except PermissionError:
        return True


def _can_be_read(run: RunDirectory) -> bool:
    return os.access(run.path, os.R_OK | os.X_OK)


def _age(name: RunName) -> str:
    return name.run_id


def is_over(run: RunDirectory) -> bool:
    """True of a run that has no more jobs, unless it lives again; of an array `history` tells it."""
    attempt = run.last_attempt()
    try:
        end = AttemptRecord.read(attempt) if attempt else None
    except ToolkitError:  # a damaged file, which the run's status names
        return False
    return end is not None and end.final

"""Search the runs below RUNS: the newest first, by name, or by a job id; from the index where it has the facts."""

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
from toolkit.terminal.talk import say

__all__ = ["is_over", "known_runs"]

FEW = 1000
SLOW_S = 1.0  # longer searches are reported
_MOST_REPORTED = 3  # unreadable runs, with one line each


class KnownRuns:
    """The runs of an index, iterated from the newest to the oldest."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index

    def __iter__(self) -> Iterator[RunDirectory]:
        for page in self.index.newest(first=10):
            for entry in page:
                run = self._run(entry.name)
                if run.may_be_run() and _can_be_read(run):
                    yield run

    def called(self, text: str) -> RunDirectory | None:
        """The run with the id `RUNID`, or `JOB/RUNID` with the name of its job."""
        job, _, run_id = text.rpartition("/")
        return (
            next((run for run in self.with_prefix(run_id, job=job) if run.run_id == run_id), None) if run_id else None
        )

    def with_prefix(self, text: str, *, job: str = "") -> Iterator[RunDirectory]:
        """The runs whose ids have this prefix, the newest first."""
        for page in self.index.newest(beginning=text, job=job):
            for entry in page:
                run = self._run(entry.name)
                if run.may_be_run():
                    yield run

    def of_job(self, job_id: str) -> Iterator[RunDirectory]:
        """The runs of a job, the newest first. Those that are over are read once, and then remembered."""
        remembered, unread = self.index.of_job(job_id), self.index.without_jobs()
        began, is_reported = time.monotonic(), False
        finished: list[tuple[RunName, list[str]]] = []
        unreadable: list[ToolkitError] = []
        try:
            for number, name in enumerate(dict.fromkeys(heapq.merge(remembered, unread, key=_age, reverse=True))):
                run = self._run(name)
                try:
                    with permissions_in_words():
                        ids = job_ids(run)
                except ToolkitError as error:  # a damaged run must not hide the others
                    if isinstance(error, DamagedFileError) and job_id in readable_job_ids(run):
                        yield run
                    else:
                        unreadable.append(error)
                    continue
                if ids and is_over(run):
                    finished.append((name, ids))
                if job_id in ids and run.may_be_run():
                    yield run
                if len(finished) >= PAGE:
                    self.index.keep_jobs(finished)
                    finished = []
                if not is_reported and time.monotonic() - began > SLOW_S:
                    is_reported = True
                    left = len(remembered) + len(unread) - number - 1
                    say(f"searching {left} runs for job {job_id}; this happens only once")
            for damage in unreadable[:_MOST_REPORTED]:
                say(f"cannot determine whether this run has job {job_id}: {damage}")
        finally:
            if finished:
                self.index.keep_jobs(finished)

    def _run(self, name: RunName) -> RunDirectory:
        return RunDirectory(self.index.runs / name.job_name / name.run_id)


@contextmanager
def known_runs(runs: Path) -> Iterator[KnownRuns]:
    """The runs below a folder. If there are few, listing them is faster than writing an index file."""
    index = RunIndex(runs, make=False)
    if index.path is None and index.count() > FEW:
        index.close()
        index = RunIndex(runs)
    with closing(index):
        yield KnownRuns(index)


def _can_be_read(run: RunDirectory) -> bool:
    return os.access(run.path, os.R_OK | os.X_OK)


def _age(name: RunName) -> str:
    return name.run_id


def is_over(run: RunDirectory) -> bool:
    """True for a run that gets no more jobs, unless it continues later; for an array `history` decides."""
    attempt = run.last_attempt()
    try:
        end = AttemptRecord.read(attempt) if attempt else None
    except ToolkitError:  # a damaged file, which the run's status names
        return False
    return end is not None and end.final

"""Searches the runs below RUNS by name or job id, newest first, with the help of the run index."""

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
SLOW_S = 1.0  # a longer search reports its progress
_MOST_REPORTED = 3  # the most unreadable runs that are reported, with one line each


class KnownRuns:
    """The runs in an index; iterates from the newest to the oldest."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index

    def __iter__(self) -> Iterator[RunDirectory]:
        for page in self.index.newest(first=10):
            for entry in page:
                run = self._run(entry.name)
                if run.may_be_run() and _can_be_read(run):
                    yield run

    def called(self, text: str) -> RunDirectory | None:
        """Return the run with the name `RUNID` or `JOB/RUNID` (with its job name), or None if there is none."""
        job, _, run_id = text.rpartition("/")
        return (
            next((run for run in self.with_prefix(run_id, job=job) if run.run_id == run_id), None) if run_id else None
        )

    def with_prefix(self, text: str, *, job: str = "") -> Iterator[RunDirectory]:
        """Yield the runs whose ids have this prefix, newest first."""
        for page in self.index.newest(beginning=text, job=job):
            for entry in page:
                run = self._run(entry.name)
                if run.may_be_run():
                    yield run

    def of_job(self, job_id: str) -> Iterator[RunDirectory]:
        """Yield the runs of a Slurm job, newest first. The job ids of finished runs are read once and then indexed."""
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
    """Yield the runs below a folder. Creates an index file only for many runs, because listing a few is faster."""
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
    """Return True if the last attempt of a run recorded a final end; False for arrays, whose tasks have attempts."""
    attempt = run.last_attempt()
    try:
        end = AttemptRecord.read(attempt) if attempt else None
    except ToolkitError:  # a file is damaged, which `toolkit status` reports
        return False
    return end is not None and end.final

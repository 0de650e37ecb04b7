"""Watch runs: read their files continuously, and query Slurm at most once every 10 s."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.run_files import RunFiles
from toolkit.rundir.states import RunState
from toolkit.runs.follow.follow import settle_s
from toolkit.runs.follow.progress import Progress, progress_of
from toolkit.runs.history.listing import unfinished_runs
from toolkit.runs.status.damaged import unreadable
from toolkit.runs.status.state import (
    ids_to_ask,
    query_clusters,
    read_files,
    read_files_of,
    read_progress,
    slurm_of_run,
    status_of_files,
)
from toolkit.runs.status.state_table import RunStatus
from toolkit.slurm.commands import Answer, Slurm

__all__ = ["Watch"]

SLURM_PERIOD_S = 10.0  # seconds between queries to a cluster
LIST_PERIOD_S = 60.0  # seconds between searches for new runs


@dataclass
class Watch:
    """Some runs, or all unfinished ones in the folders `all_of`."""

    runs: list[RunDirectory]
    all_of: Sequence[Path] = ()
    _statuses: dict[RunDirectory, RunStatus] = field(default_factory=dict)
    _answers: dict[Slurm, Answer] = field(default_factory=dict)
    _asked_at: float = float("-inf")
    _listed_at: float = float("-inf")
    _ended_at: dict[RunDirectory, float] = field(default_factory=dict)

    def look(self) -> list[Progress]:
        """Return the progress of each run.

        Raises:
            ToolkitError: the files of a run are damaged, unless all runs of a folder are watched.
        """
        now = time.monotonic()
        if self.all_of and now - self._listed_at >= LIST_PERIOD_S:
            self._listed_at = self._asked_at = now  # listing the runs has also queried Slurm
            self._take_new()
        if now - self._asked_at >= SLURM_PERIOD_S:
            self._asked_at, self._answers = now, query_clusters(read_files_of(self.runs).values())
        return [self._look_at(run) for run in self.runs]

    def _take_new(self) -> None:
        """Watch all unfinished runs, except damaged ones and those of another host, whose state cannot change here."""
        for status in unfinished_runs(self.all_of):
            is_readable = bool(status.ranks)
            if status.state is not RunState.UNKNOWN or (is_readable and status.job_id[:1].isdigit()):
                self._statuses[RunDirectory(Path(status.path))] = status
        self.runs = list(self._statuses)

    def _look_at(self, run: RunDirectory) -> Progress:
        try:
            files = read_files(run)
            answer = self._answers.get(slurm_of_run(files), {})
            if run in self._statuses and self._is_new(files, answer):
                status = replace(self._statuses[run], step=read_progress(files).step)
            else:
                status = status_of_files(files, answer)
            self._statuses[run] = status
            return progress_of(run, status, None if isinstance(answer, ToolkitError) else answer.get(status.job_id))
        except ToolkitError as error:
            if not self.all_of:
                raise
            return Progress(unreadable(run, error))

    def _is_new(self, files: RunFiles, answer: Answer) -> bool:
        """Return whether Slurm has not been queried for a job yet; the known state of its run then remains."""
        return not isinstance(answer, ToolkitError) and not set(ids_to_ask(files)) <= set(answer)

    def are_over(self, found: list[Progress]) -> bool:
        """Return whether every run has ended for good."""
        now = time.monotonic()
        for one, run in zip(found, self.runs, strict=True):
            if not one.status.state.final:
                self._ended_at.pop(run, None)  # the run is active again, for example after a requeue
            elif run not in self._ended_at:
                self._ended_at[run] = now
        return all(
            run in self._ended_at and now - self._ended_at[run] >= settle_s(one.status)
            for one, run in zip(found, self.runs, strict=True)
        )

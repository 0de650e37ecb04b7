"""What is known of a run at one moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from toolkit.metrics.validation import ValidationRecord, in_words
from toolkit.rundir.states import RunState
from toolkit.rundir.sweep import Values
from toolkit.runs.status.array_status import TaskStatus
from toolkit.slurm.clusters import named


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. `reason` says in words what is known; `source` who said it."""

    run_id: str
    job_name: str
    state: RunState
    site: str
    job_id: str
    reason: str
    source: str
    nodes: int | str
    ranks: int
    starts: int
    attempts: int
    step: int | None
    exit_code: int | None
    path: str
    tasks: tuple[TaskStatus, ...] | None = None  # of an array run
    cannot_start: bool = False  # as of a `Word`; of an array where none of its tasks that live can
    values: Values | None = None  # of a task of a sweep: what it has in place of the job's
    validation: ValidationRecord | None = None  # the last one that the run has not gone back over
    cluster: str = ""  # where it is named, since the job is not on the site's own

    @property
    def full_job_id(self) -> str:
        """The job's id as a user gives it."""
        return named(self.job_id, self.cluster)

    @property
    def validated(self) -> str:
        """The last validation in words, and that it ended the run where it did; "" before the first."""
        last = self.validation
        if last is None:
            return ""
        stopped = f"; stopped early: {last.stopped}" if self.stopped_early else ""
        return f"validated at step {last.step}: {in_words(last.means)}{stopped}"

    @property
    def stopped_early(self) -> bool:
        """Whether the run's last validation ended it."""
        last = self.validation
        if last is None or self.state is not RunState.COMPLETED:
            return False
        return bool(last.stopped) and last.step == self.step

    def as_json(self) -> dict[str, Any]:
        """The documented JSON of `status --json`."""
        tasks = None if self.tasks is None else [task.as_json() for task in self.tasks]
        validation = None if self.validation is None else self.validation.as_json()
        without = replace(self, tasks=None, validation=None)  # each of them says itself how it is written
        told = {**asdict(without), "state": self.state.value, "tasks": tasks, "validation": validation}
        del told["cannot_start"]  # `explain --json` tells it with the reason
        return told

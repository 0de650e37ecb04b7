"""What is known of a run, and of each task of an array run, at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from toolkit.metrics.validation import ValidationRecord
from toolkit.metrics.validation import in_words as validation_in_words
from toolkit.rundir.states import RunState
from toolkit.rundir.sweep import Values, in_words
from toolkit.slurm.commands import named

__all__ = ["RunStatus", "TaskStatus", "summarize_tasks"]

# The state of an array is the first of these that a task is in.
_ORDER = (
    RunState.CANCELLING, RunState.RUNNING, RunState.PENDING, RunState.UNKNOWN, RunState.FAILED, RunState.LOST,
    RunState.TIMEOUT, RunState.PREEMPTED, RunState.CANCELLED, RunState.STOPPED, RunState.COMPLETED,
)  # fmt: skip


@dataclass(frozen=True)
class TaskStatus:
    """One task of an array run. `job_id` is Slurm's, `123_4`; `source` and `cannot_start` are those of a `StateReport`.

    `values` are the swept values of the task.
    """

    task: int
    job_id: str
    state: RunState
    reason: str
    source: str
    exit_code: int | None
    cannot_start: bool = False
    values: Values | None = None

    @property
    def named(self) -> str:
        """`task 3`, or `task 3 (train.lr=0.0003)`."""
        return f"task {self.task} ({in_words(self.values)})" if self.values else f"task {self.task}"

    def as_json(self) -> dict[str, Any]:
        """One of the `tasks` of `status --json`."""
        return {
            "task": self.task, "job_id": self.job_id, "state": self.state.value, "reason": self.reason,
            "exit_code": self.exit_code, "values": None if self.values is None else dict(self.values),
        }  # fmt: skip


@dataclass(frozen=True)
class RunStatus:
    """A run. `reason` is a sentence on what is known; `source` is where it comes from."""

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
    cannot_start: bool = False  # of a `StateReport`; of an array if none of its open tasks can start
    values: Values | None = None  # the swept values, of a task of a sweep
    validation: ValidationRecord | None = None  # the last one that the run has not gone back over
    cluster: str = ""  # if the job names another cluster than its site's

    @property
    def full_job_id(self) -> str:
        """The job's id as a user gives it."""
        return named(self.job_id, self.cluster)

    @property
    def validated(self) -> str:
        """The last validation as a sentence, with why it ended the run if it did; "" before the first."""
        last = self.validation
        if last is None:
            return ""
        stopped = f"; stopped early: {last.stopped}" if self.stopped_early else ""
        return f"validated at step {last.step}: {validation_in_words(last.means)}{stopped}"

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
        without = replace(self, tasks=None, validation=None)  # both have their own JSON form
        value = {**asdict(without), "state": self.state.value, "tasks": tasks, "validation": validation}
        del value["cannot_start"]  # `explain --json` has it, with the reason
        return value


def summarize_tasks(tasks: Sequence[TaskStatus]) -> tuple[RunState, str, int | None]:
    """The state of an array, its tasks by state (`3 running, 6 pending`), and the exit code of the first task in that state."""
    counts = Counter(task.state for task in tasks)
    state = next((state for state in _ORDER if counts[state]), RunState.UNKNOWN)
    code = next((task.exit_code for task in tasks if task.state is state and task.exit_code is not None), None)
    return state, ", ".join(f"{counts[one]} {one.value}" for one in _ORDER if counts[one]), code

"""The state of an array run: that of each task, and of all of them in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.jobs import job_ids
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.parts import Part, slurm_id
from toolkit.rundir.states import RunState
from toolkit.rundir.sweep import Sweep, Values, in_words
from toolkit.runs.status.slurm_state import RECORD_SOURCE, Answer, StateReport, state_from_slurm

# What all of them are while some are: the first that any task is in.
_ORDER = (
    RunState.CANCELLING, RunState.RUNNING, RunState.PENDING, RunState.UNKNOWN, RunState.FAILED, RunState.LOST,
    RunState.TIMEOUT, RunState.PREEMPTED, RunState.CANCELLED, RunState.STOPPED, RunState.COMPLETED,
)  # fmt: skip


@dataclass(frozen=True)
class TaskStatus:
    """One task of an array run at one moment. `job_id` is Slurm's, `123_4`; `source` is who told the state, and
    `cannot_start` as of a `Word`. `values` are what it has in place of the job's in a sweep.
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


def task_job_id(run: RunDirectory, task: int, array_job: str, parts: Sequence[Part]) -> str:
    """Slurm's id of a task: the one that its last start has, else its place in the array."""
    ids = job_ids(run.task(task))
    return ids[-1] if ids else slurm_id(parts, array_job, task)


def task_status(
    run: RunDirectory, task: int, job_id: str, final: StateReport | None, answer: Answer, sweep: Sweep | None
) -> TaskStatus:
    """One task: its own final word, else Slurm's."""
    word = final or state_from_slurm(run.task(task), job_id, answer)
    code = exit_code_of_end(run.task(task), word)
    values = sweep.values_of(task) if sweep is not None else None
    return TaskStatus(task, job_id, word.state, word.reason, word.source, code, word.cannot_start, values)


def exit_code_of_end(run: RunDirectory, word: StateReport) -> int | None:
    """What the last attempt's end says where `word` is its own: an earlier life has no say in what Slurm tells."""
    attempt = run.last_attempt() if word.source == RECORD_SOURCE else None
    end = read_json_or_none(attempt.exit_file) if attempt else None
    return int(end["exit_code"]) if end and end["final"] else None


def exit_code_of_tasks(state: RunState, tasks: Sequence[TaskStatus]) -> int | None:
    """That of the first task that ended as the whole array did; None where no such task wrote one down."""
    return next((task.exit_code for task in tasks if task.state is state and task.exit_code is not None), None)


def word_of_tasks(array: str, tasks: Sequence[TaskStatus]) -> StateReport:
    """All tasks in one line: `array 0-9: 3 running, 6 pending, 1 failed`."""
    counts = Counter(task.state for task in tasks)
    state = next((state for state in _ORDER if counts[state]), RunState.UNKNOWN)
    told = ", ".join(f"{counts[one]} {one.value}" for one in _ORDER if counts[one])
    living = [task for task in tasks if not task.state.final]
    stuck = bool(living) and all(task.cannot_start for task in living)
    return StateReport(state, f"array {array}: {told}", "tasks", stuck)

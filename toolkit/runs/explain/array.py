"""An array run as a whole: how its tasks stand, why the waiting ones wait, and which failed how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolkit.errors import counted
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.rundir.sweep import Values, common_values, in_words
from toolkit.runs.explain.model import Evidence, Explanation, cause_in_words, quote_file
from toolkit.runs.explain.waiting import explain_waiting
from toolkit.runs.status.state_table import RunStatus, TaskStatus

FAILURES_SHOWN = 3


def explain_array(run: RunDirectory, status: RunStatus) -> Explanation:
    """The tasks in one sentence, then what holds the waiting ones, then the first failures."""
    assert status.tasks is not None  # of an array run
    failed = [task for task in status.tasks if task.state.final and task.state is not RunState.COMPLETED]
    waiting = [task for task in status.tasks if task.state is RunState.PENDING]
    evidence = _failures(run, failed)
    if status.state is RunState.UNKNOWN:
        silent = next(task for task in status.tasks if task.state is RunState.UNKNOWN)
        why = f"{status.reason}; of task {silent.task}: {silent.reason}"
        return Explanation("no_answer", why, follows="unknown", evidence=evidence, actions=["ask again later"])
    if status.state is RunState.CANCELLING:
        return Explanation(
            "cancelling", status.reason, evidence=evidence, actions=[f"`toolkit wait {run.run_id}`"],
            follows="the tasks that were asked to end save and leave, at the latest when Slurm kills them; others go on",
        )  # fmt: skip
    closer = [f"`toolkit explain {run.run_id}_{task.task}` says more of {task.named}" for task in failed[:1]]
    if waiting:
        explanation = explain_waiting(run, status)
        return replace(
            explanation, why=f"{status.reason}; {explanation.why}", evidence=[*explanation.evidence, *evidence],
            actions=[*closer, *explanation.actions],
        )  # fmt: skip
    if status.state.final:
        if not failed:
            return Explanation("completed", status.reason)
        again = f"`toolkit resume {run.run_id}` runs those again that are not completed"
        why = status.reason + _what_failed_alike(status)
        return Explanation("tasks_failed", why, evidence=evidence, actions=[*closer, again])
    return Explanation(
        "running", status.reason, follows="its tasks go on to their ends", evidence=evidence,
        actions=[*closer, f"`toolkit wait {run.run_id}`"],
    )  # fmt: skip


def _what_failed_alike(status: RunStatus) -> str:
    """Of a sweep the values that every failed task has, and no completed one."""
    failed: list[Values] = []
    completed: list[Values] = []
    for task in status.tasks or ():
        (completed if task.state is RunState.COMPLETED else failed).append(task.values or {})
    common = common_values(failed, completed)
    return f"; all {len(failed)} that failed have {in_words(common)}, and no other" if common else ""


def _failures(run: RunDirectory, failed: Sequence[TaskStatus]) -> list[Evidence]:
    """How the first of them ended, and how many more there are."""
    evidence = [one for task in failed[:FAILURES_SHOWN] if (one := _end_of(run, task)) is not None]
    if (more := len(failed) - FAILURES_SHOWN) > 0:
        explanation = f"{counted(more, 'more task')} not completed; `toolkit status {run.run_id} --tasks` lists all"
        evidence.append(Evidence(str(run.tasks), explanation))
    return evidence


def _end_of(run: RunDirectory, task: TaskStatus) -> Evidence | None:
    attempt = run.task(task.task).last_attempt()
    end = AttemptRecord.read(attempt) if attempt is not None else None
    if attempt is None or end is None:
        return None
    words = cause_in_words(attempt, end)
    return quote_file(run, attempt.exit_file, f"{in_words(task.values)}: {words}" if task.values else words)

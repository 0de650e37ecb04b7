"""What state a run is in: its own final word first, then Slurm's, then the process table's. Never a guess."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import CheckFailedError, NotFoundError, SchedulerRefusedError, ToolkitError
from toolkit.metrics.training import last_record
from toolkit.metrics.validation import ValidationRecord, last_validation
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.find import has_begun, newest_record
from toolkit.rundir.jobs import job_ids
from toolkit.rundir.layout import RunDirectory, start_of, step_of
from toolkit.rundir.parts import newest_parts, slurm_id
from toolkit.rundir.states import RunState
from toolkit.rundir.sweep import read_sweep, values_of_task
from toolkit.rundir.task_files import read_begun
from toolkit.runs.record.job import recorded_job, slurm_of, uses_slurm
from toolkit.runs.status.array_status import (
    TaskStatus,
    exit_code_of_end,
    exit_code_of_tasks,
    task_job_id,
    task_status,
    word_of_tasks,
)
from toolkit.runs.status.reconcile_submission import (
    last_open_start,
    settle,
    state_from_submission,
    tasks_in,
    was_given_by_hand,
)
from toolkit.runs.status.rehearsal_notes import reason_of
from toolkit.runs.status.run_status import RunStatus
from toolkit.runs.status.slurm_state import (
    RECORD_SOURCE,
    Answer,
    StateReport,
    state_from_process_table,
    state_from_slurm,
)
from toolkit.slurm.array import write_array


def run_status(run: RunDirectory, answer: Answer | None = None) -> RunStatus:
    """The state of one run, or of one task of an array run. `answer` is Slurm's where it was asked for all runs at once, for
    the ids that `ids_to_ask` names; None asks it now, and so does a job that was submitted after the question.
    """
    job = recorded_job(run)
    opened = None
    if last_open_start(run) is not None:
        opened, answer = settle(run, slurm_of(job)), None
    job_id = newest_job_id(run)
    tasks = None
    word = state_from_submission(opened, job_id)
    if word is None and job_id and _is_array(run, job):
        answer = _answer_for(ids_to_ask(run, job), job, answer)
        tasks = _task_statuses(run, job, job_id, answer)
        asked = job.job.tasks is not None and len(job.job.tasks) == len(tasks)
        word = word_of_tasks(job.job.array if asked else f"of {len(tasks)} tasks", tasks)
    elif word is None:
        word = state_from_record(run) or _state_of_unfinished_run(run, job, job_id, answer)
        # The run may have ended between the two looks, and then its own word counts.
        word = (state_from_record(run) if word.state.final else None) or word
    nodes, ranks = _shape(run, job)
    step = last_step(run)
    return RunStatus(
        run_id=run.run_id, job_name=run.job_name, state=word.state, site=job.site.name, job_id=job_id, reason=word.reason,
        source=word.source, nodes=nodes, ranks=ranks,
        starts=_count(run, tasks, RunDirectory.start_numbers), attempts=_count(run, tasks, RunDirectory.attempt_numbers),
        step=step, exit_code=exit_code_of_end(run, word) if tasks is None else exit_code_of_tasks(word.state, tasks),
        path=str(run.path), tasks=tasks, cannot_start=word.cannot_start, validation=_validation(run, step),
        values=values_of_task(run), cluster=job.job.cluster,
    )  # fmt: skip


def newest_job_id(run: RunDirectory) -> str:
    """Slurm's id of a run's newest job, or of a task's place in its array; "" before there is any."""
    ids = job_ids(run)
    if not ids and run.task_number is None:
        return ""
    if ids:  # of jobs in turn, 123_1 and 123_2, only all together tell whether the run goes on
        return ids[-1] if run.task_number is not None else ids[-1].partition("_")[0]
    assert run.task_number is not None  # else it would have been answered above
    return slurm_id(newest_parts(run), newest_job_id(run.whole), run.task_number)


def ids_to_ask(run: RunDirectory, job: ResolvedJob) -> list[str]:
    """The ids that Slurm is to be asked for: of the run, or of each task of an array that has no final word yet."""
    job_id = newest_job_id(run)
    if not job_id or not uses_slurm(job):
        return []
    if not _is_array(run, job):
        return [] if state_from_record(run) else [job_id]
    parts = newest_parts(run)
    return [
        task_job_id(run, task, job_id, parts) for task in _tasks(run, job) if state_from_record(run.task(task)) is None
    ]


def _is_array(run: RunDirectory, job: ResolvedJob) -> bool:
    return job.job.tasks is not None and run.task_number is None


def _tasks(run: RunDirectory, job: ResolvedJob) -> list[int]:
    """Those of the last submission, those that have begun, and those of the first one: a resume may leave some out."""
    first = tasks_in(run.record) if newest_record(run) != run.record else ()
    return sorted({*(job.job.tasks or ()), *run.task_numbers(), *first})


def _task_statuses(run: RunDirectory, job: ResolvedJob, job_id: str, answer: Answer) -> tuple[TaskStatus, ...]:
    sweep, parts = read_sweep(run), newest_parts(run)
    return tuple(
        task_status(run, task, task_job_id(run, task, job_id, parts), state_from_record(run.task(task)), answer, sweep)
        for task in _tasks(run, job)
    )


def _count(run: RunDirectory, tasks: Sequence[TaskStatus] | None, numbers: Callable[[RunDirectory], list[int]]) -> int:
    if tasks is None:
        return len(numbers(run))
    return sum(len(numbers(run.task(number))) for number in run.task_numbers())


def _shape(run: RunDirectory, job: ResolvedJob) -> tuple[int | str, int]:
    """Nodes and ranks: what the last attempt got, as long as no later start was submitted; else what is asked for."""
    attempt = run.last_attempt()
    begun = read_begun(attempt) if attempt else None
    if begun is not None and begun["start"] >= _last_submitted(run):
        return begun["nodes"], begun["ranks"]
    return job.nodes, min(job.rank_counts)


def last_step(run: RunDirectory) -> int | None:
    """The last step that anybody wrote down: the heartbeat is at most one a second, and lags behind.

    An attempt that has made none stands where it began, at the newest checkpoint. None before the first attempt.
    """
    attempt = run.last_attempt()
    if attempt is None:
        return None
    beat, end = read_json_or_none(attempt.heartbeat), read_json_or_none(attempt.exit_file)
    record = last_record(run.metrics / "train.jsonl")
    steps = [
        beat["step"] if beat else None,
        end["step"] if end else None,
        record.step if record is not None and record.attempt == attempt.number else None,
    ]
    made = max((step for step in steps if step is not None), default=None)
    if made is not None or not (committed := run.committed_checkpoints()):
        return made
    return step_of(committed[-1])


def _validation(run: RunDirectory, step: int | None) -> ValidationRecord | None:
    """The last one, where the run has not gone back over it."""
    last = last_validation(run.metrics / "validation.jsonl")
    return last if last is not None and step is not None and last.step <= step else None


def require_task(run: RunDirectory) -> None:
    """Refuse a task that its array run has not; one that has not begun is known, too.

    Raises:
        NotFoundError: there is no such task.
    """
    job = recorded_job(run)
    if job.job.tasks is None:
        raise NotFoundError(
            f"run {run.whole.run_id} is no array, so it has no task {run.task_number}",
            where=str(run.whole.path),
            fix=f"name the run alone, {run.whole.run_id}",
        )
    if run.task_number not in (tasks := _tasks(run.whole, job)):
        raise NotFoundError(
            f"run {run.whole.run_id} has no task {run.task_number}",
            where=str(run.whole.path),
            fix=f"give one of its tasks, {write_array(tasks)}",
        )


def require_submitted(run: RunDirectory) -> None:
    """Refuse a run that is only rendered: nothing of it will happen by itself.

    Raises:
        CheckFailedError: it was neither submitted nor has it started.
    """
    if not has_begun(run.whole):
        job = recorded_job(run.whole)
        if uses_slurm(job) and was_given_by_hand(run.whole, slurm_of(job)):
            return
        shell = "sbatch" if uses_slurm(job) else "bash"
        raise CheckFailedError(
            f"run {run.run_id} is rendered, not submitted", fix=f"`{shell} {shlex.quote(str(run.script(0)))}`"
        )


def state_from_record(run: RunDirectory) -> StateReport | None:
    """The last attempt's verdict, when no later start was submitted."""
    attempt = run.last_attempt()
    end = read_json_or_none(attempt.exit_file) if attempt else None
    if attempt is None or end is None or not end["final"]:
        return None
    begun = read_begun(attempt)
    if begun is None or _last_submitted(run) > begun["start"]:
        return None
    place = f"rank {end['rank']} on {end['host']}: " if end.get("rank") is not None else ""
    return StateReport(RunState(end["state"]), place + reason_of(attempt, end), RECORD_SOURCE)


def _last_submitted(run: RunDirectory) -> int:
    return max(map(start_of, run.path.glob("submitted-*.json")), default=0)


def ask_slurm(job: ResolvedJob, job_ids: list[str]) -> Answer:
    """What the job's cluster says of some jobs; its silence is an answer too."""
    try:
        return {**dict.fromkeys(job_ids), **slurm_of(job).jobs(job_ids)}
    except (SchedulerRefusedError, NotFoundError) as error:
        return error


def _answer_for(job_ids: list[str], job: ResolvedJob, answer: Answer | None) -> Answer:
    """`answer` where it is one to the question for `job_ids`, else a new one."""
    if answer is not None and (isinstance(answer, ToolkitError) or set(job_ids) <= set(answer)):
        return answer
    return ask_slurm(job, job_ids)


def _state_of_unfinished_run(run: RunDirectory, job: ResolvedJob, job_id: str, answer: Answer | None) -> StateReport:
    if not job_id:
        return StateReport(RunState.CREATED, "rendered, not submitted", "run directory")
    if job_id.startswith("local-"):
        return state_from_process_table(run, job_id)
    if not uses_slurm(job):
        return StateReport(RunState.UNKNOWN, f"job {job_id} is not of site {job.site.name}", "run directory")
    return state_from_slurm(run, job_id, _answer_for([job_id], job, answer))

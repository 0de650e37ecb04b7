"""Explain a run's state, what follows by itself, and what to do."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from toolkit.errors import DamagedFileError, ToolkitError, counted
from toolkit.rundir.attempt_records import FAILED_INSIDE, AttemptRecord, MatchedFiles
from toolkit.rundir.files import read_json_or_none, read_lines
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.rundir.sweep import Values, common_values, in_words
from toolkit.runs.explain.ended import explain_ended, reason_in_log
from toolkit.runs.explain.model import Evidence, Explanation, Waiting, cause_in_words, quote_file
from toolkit.runs.explain.running import explain_unfinished
from toolkit.runs.explain.waiting import explain_waiting
from toolkit.runs.record.job import recorded_job
from toolkit.runs.record.parents import Parent, parents_of
from toolkit.runs.status.state import run_status
from toolkit.runs.status.state_table import RECORD_SOURCE, RunStatus, TaskStatus, state_phrase
from toolkit.runs.verdicts import verdict_lines
from toolkit.slurm.reasons import CanStart
from toolkit.supervise.progress import alike
from toolkit.supervise.symptoms import STEP_FAILED
from toolkit.terminal.talk import clean

__all__ = ["explain_run", "lines_of"]

FAILURES_SHOWN = 3


def explain_array(run: RunDirectory, status: RunStatus) -> Explanation:
    """Explain an array: its tasks in one sentence, then why some wait, then the first failures."""
    assert status.tasks is not None  # the caller passes only array runs
    failed = [task for task in status.tasks if task.state.final and task.state is not RunState.COMPLETED]
    waiting = [task for task in status.tasks if task.state is RunState.PENDING]
    evidence = _failures(run, failed)
    if status.state is RunState.UNKNOWN:
        silent = next(task for task in status.tasks if task.state is RunState.UNKNOWN)
        why = f"{status.reason}; task {silent.task}: {silent.reason}"
        return Explanation("no_answer", why, follows="unknown", evidence=evidence, actions=["retry later"])
    if status.state is RunState.CANCELLING:
        return Explanation(
            "cancelling", status.reason, evidence=evidence, actions=[f"`toolkit wait {run.run_id}`"],
            follows="cancelled tasks save and exit, at the latest when Slurm kills them; others continue",
        )  # fmt: skip
    closer = [f"`toolkit explain {run.run_id}_{task.task}` explains {task.named} in detail" for task in failed[:1]]
    if waiting:
        explanation = explain_waiting(run, status)
        return replace(
            explanation, why=f"{status.reason}; {explanation.why}", evidence=[*explanation.evidence, *evidence],
            actions=[*closer, *explanation.actions],
        )  # fmt: skip
    if status.state.final:
        if not failed:
            hidden = [task for task in status.tasks if FAILED_INSIDE in task.reason]
            fixes = [STEP_FAILED.fix] if hidden else []
            return Explanation(
                "completed", status.reason, evidence=_failures(run, hidden[:FAILURES_SHOWN]), actions=fixes
            )
        again = f"`toolkit resume {run.run_id}` resumes the tasks that have not completed"
        why = status.reason + _what_failed_alike(status) + _same_reason(run, failed)
        return Explanation("tasks_failed", why, evidence=evidence, actions=[*closer, again])
    return Explanation(
        "running", status.reason, follows="its tasks continue until they end", evidence=evidence,
        actions=[*closer, f"`toolkit wait {run.run_id}`"],
    )  # fmt: skip


def _what_failed_alike(status: RunStatus) -> str:
    """Return the swept values that every failed task has and no completed one."""
    failed: list[Values] = []
    completed: list[Values] = []
    for task in status.tasks or ():
        (completed if task.state is RunState.COMPLETED else failed).append(task.values or {})
    common = common_values(failed, completed)
    return f"; all {len(failed)} failed tasks have {in_words(common)}, and no completed task has" if common else ""


def _same_reason(run: RunDirectory, failed: Sequence[TaskStatus]) -> str:
    """Return the reason that all failed tasks share, apart from paths and numbers in it; "" if they differ or one has none."""
    failed = [task for task in failed if task.state is RunState.FAILED]
    ends = [_end_of(run, task) for task in failed]
    reasons = [
        end.line.removeprefix(f"{in_words(task.values)}: " if task.values else "")
        for end, task in zip(ends, failed, strict=True)
        if end
    ]
    kinds = {(task.exit_code, *alike([reason])) for task, reason in zip(failed, reasons, strict=False)}
    if len(reasons) < max(2, len(ends)) or len(kinds) > 1:
        return ""
    how = "for the same reason" if len({*reasons}) == 1 else "for similar reasons, the first"
    return f"; all {len(reasons)} failed {how}: {reasons[0]}"


def _failures(run: RunDirectory, failed: Sequence[TaskStatus]) -> list[Evidence]:
    """Return how the first failed tasks ended, and the number of the others."""
    evidence = [one for task in failed[:FAILURES_SHOWN] if (one := _end_of(run, task)) is not None]
    if (more := len(failed) - FAILURES_SHOWN) > 0:
        explanation = f"{counted(more, 'more task')} not completed; `toolkit status {run.run_id} --tasks` lists all"
        evidence.append(Evidence(str(run.tasks), explanation))
    return evidence


def _end_of(run: RunDirectory, task: TaskStatus) -> Evidence | None:
    """Quote how a task ended: its record, or else its files."""
    of_task = run.task(task.task)
    attempt = of_task.last_attempt()
    end = AttemptRecord.read(attempt) if attempt is not None else None
    if attempt is None or end is None:
        return reason_in_log(of_task, task.job_id) if task.job_id else None
    words = cause_in_words(attempt, end)
    return quote_file(run, attempt.exit_file, f"{in_words(task.values)}: {words}" if task.values else words)


LAST_EVENTS = 5


def explain_run(run: RunDirectory) -> Explanation:
    """Explain a run from its files and from Slurm."""

    status = run_status(run)
    if (broken := explain_broken_chain(run, status)) is not None:
        explanation = broken
    elif status.tasks is not None and status.state is not RunState.CREATED:
        explanation = explain_array(run, status)
    elif status.state.final:
        explanation = explain_ended(run, status)
    elif status.state is RunState.PENDING:
        explanation = explain_waiting(run, status)
    else:
        explanation = explain_unfinished(run, status)
    evidence = [
        *explanation.evidence,
        *_matched_files(run),
        *_verdicts(run, status),
        *_validated(run, status),
        *_guarded(run),
        *_rehearsals(run, status),
    ]
    return replace(explanation, status=status, events=last_events(run), evidence=evidence)


def _matched_files(run: RunDirectory) -> list[Evidence]:
    """Return what `restart.progress` matched at the end of the last attempt that has ended."""
    for attempt in map(run.attempt, reversed(run.attempt_numbers())):
        try:
            files = MatchedFiles.read(attempt)
        except DamagedFileError as error:
            return [quote_file(run, attempt.matched_files, error.message)]
        if files is not None:
            return [quote_file(run, attempt.matched_files, str(files))]
    return []


def _verdicts(run: RunDirectory, status: RunStatus) -> list[Evidence]:
    """Return the raised verdicts of a run or task."""
    lines = [] if status.state is RunState.PENDING else verdict_lines(run, status.state)
    return [quote_file(run, run.metrics / "verdicts.jsonl", line) for line in lines]


def _validated(run: RunDirectory, status: RunStatus) -> list[Evidence]:
    """Return the last validation of the model."""
    return [quote_file(run, run.metrics / "validation.jsonl", status.validated)] if status.validated else []


def _guarded(run: RunDirectory) -> list[Evidence]:
    """Return the number of bad steps that `train.guard` found, as stored in the newest checkpoint."""
    from toolkit.checkpoint.format.layout import MANIFEST
    from toolkit.checkpoint.format.manifest_file import read_body

    newest = run.committed_checkpoints()[-1:]
    if not newest or recorded_job(run).train.guard == "off":
        return []
    try:
        bad = read_body(newest[0])["state"]["extra"]["guard"]["bad_steps"]
    except (ToolkitError, OSError, KeyError, TypeError):  # damaged (`ckpt verify` reports it) or saved by another guard
        return []
    which = f"; the log names {'it' if bad == 1 else 'each'}: `toolkit logs {run.run_id} --rank 0`"
    return [quote_file(run, newest[0] / MANIFEST, f"the guard found {counted(bad, 'bad step')}{which}")] if bad else []


def _rehearsals(run: RunDirectory, status: RunStatus) -> list[Evidence]:
    """Return what `toolkit rehearse` did to the last attempt and, if that has not ended, to the previous one."""
    evidence = []
    for attempt in map(run.attempt, run.attempt_numbers()[-2:]):
        explained = attempt == run.last_attempt() or not _has_ended(run, status)
        if explained and (word := read_json_or_none(attempt.rehearsed)) is not None:
            explanation = f"{word['failure']} was rehearsed at {word['time']}: {word['done']}"
            evidence.append(quote_file(run, attempt.rehearsed, explanation))
    return evidence


def _has_ended(run: RunDirectory, status: RunStatus) -> bool:
    """Return whether the last attempt has ended, whatever follows it."""
    last = run.last_attempt()
    return status.state.final or (last is not None and last.exit_file.exists())


def last_events(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the last events of the run, oldest first, each with its attempt."""
    found: list[dict[str, Any]] = []
    for number in reversed(run.attempt_numbers()):
        of_attempt = [{"attempt": number, **event} for event in read_lines(run.attempt(number).events)]
        found = of_attempt + found
        if len(found) >= LAST_EVENTS:
            break
    return found[-LAST_EVENTS:]


def lines_of(explanation: Explanation) -> Iterator[str]:
    """Yield the lines of the explanation: state, reason, evidence, what follows, what to do."""
    status = explanation.status
    assert status is not None  # `explain_run` sets it
    job = f" (job {status.full_job_id})" if status.job_id else ""
    job += f" with {in_words(status.values)}" if status.values else ""
    step = f", step {status.step}" if status.step is not None else ""
    yield f"{status.job_name} {status.run_id}{job} {state_phrase(status.state)}{step}"
    yield from body_of(explanation)


def body_of(explanation: Explanation) -> Iterator[str]:
    """Yield the lines after the state: reason, evidence, what follows, what to do."""
    yield f"why       {explanation.why}"
    for quoted in explanation.evidence:
        line = clean(quoted.line).replace("\n", " ")
        yield (
            f"          {quoted.source} contains this"
            if line in explanation.why
            else f"          {quoted.source}: {line}"
        )
    if explanation.waiting is not None:
        yield f"start     {_start_in_words(explanation.waiting)}"
    if explanation.events:
        yield "events    " + "; ".join(_event_in_words(event) for event in explanation.events[-3:])
    yield f"follows   {explanation.follows or 'nothing by itself'}"
    for number, action in enumerate(explanation.actions):
        yield f"{'' if number else 'do':<10}{action}"


def _start_in_words(waiting: Waiting) -> str:
    if waiting.can_start is CanStart.NEVER:
        return "never, unless the job or the cluster changes"
    expected = (
        f"expected at {_local(waiting.estimated_start)}" if waiting.estimated_start else "Slurm has no estimate yet"
    )
    if waiting.can_start is CanStart.UNKNOWN:
        return f"unknown; {expected}"
    if waiting.not_before is not None:
        return f"not before {_local(waiting.not_before)}"
    return f"{'it will start' if waiting.can_start is CanStart.YES else 'not before this has changed'}; {expected}"


def _event_in_words(event: dict[str, Any]) -> str:
    details = " ".join(f"{key}={value}" for key, value in event.items() if key not in ("attempt", "time", "event"))
    return f"{_local(event['time'])} {event['event']} {details}".strip()


def _local(moment: str) -> str:
    """Format a UTC time in local time, with the date unless it is today."""
    then = datetime.fromisoformat(moment).astimezone()
    today = then.date() == datetime.now(UTC).astimezone().date()
    return f"{then:%H:%M:%S}" if today else f"{then:%Y-%m-%d %H:%M:%S}"


def explain_broken_chain(run: RunDirectory, status: RunStatus) -> Explanation | None:
    """Explain a failed parent; None if the run has not ended, or ended for another reason."""
    said_by = [part.source for part in status.tasks or (status,)]
    if not status.state.final or RECORD_SOURCE in said_by or (broken := failed_parent(run)) is None:
        return None
    parent, ended = broken
    waited_for = f"after {parent.kind} {parent.run_id} (job {parent.job_id})"
    return Explanation(
        "parent_failed",
        f"run {parent.run_id}, whose success it requires, {state_phrase(ended.state)}: {ended.reason}",
        evidence=[Evidence("record.json", waited_for)],
        actions=[
            f"`toolkit explain {parent.run_id}` explains why",
            f"`toolkit resume {parent.run_id}`, then `toolkit resume {run.run_id} --after {parent.run_id}`",
            f"`toolkit resume {run.run_id}` starts this run without it",
        ],
    )


def failed_parent(run: RunDirectory) -> tuple[Parent, RunStatus] | None:
    """Return the first parent whose success was required but that ended otherwise, or None."""
    for parent in parents_of(run.whole):
        if parent.kind == "ok" and parent.run.record.exists():
            status = run_status(parent.run)
            if status.state.final and status.state is not RunState.COMPLETED:
                return parent, status
    return None

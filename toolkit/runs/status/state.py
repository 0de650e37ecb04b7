"""Determine the state of runs: read their files, query each cluster once, and apply the table of `state_table`."""

import shlex
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.errors import CheckFailedError, NotFoundError, ToolkitError, counted
from toolkit.metrics.run_metrics import newest_metrics
from toolkit.metrics.validation import ValidationRecord, last_validation
from toolkit.rundir.attempt_records import FAILED_INSIDE
from toolkit.rundir.claims import process_start_ticks, slurm_id
from toolkit.rundir.files import permissions_in_words, why_full
from toolkit.rundir.find import has_begun
from toolkit.rundir.layout import RunDirectory, step_of
from toolkit.rundir.run_files import FolderFiles, RunFiles, has_changed, read_run
from toolkit.rundir.states import RunState
from toolkit.runs.status.state_table import (
    RECORD_SOURCE,
    HostFacts,
    RunStatus,
    Situation,
    StateReport,
    TaskStatus,
    report_state,
    summarize_tasks,
)
from toolkit.runs.status.unknown_names import vanished
from toolkit.slurm.array import parse_array, write_array
from toolkit.slurm.commands import Answer, Slurm, slurm_of_site

__all__ = [
    "Progress", "decide_state", "host_of_local_run", "ids_to_ask", "own_status", "query_clusters", "read_files",
    "read_files_of", "read_processes", "read_progress", "require_submitted", "require_task", "run_status",
    "run_statuses", "slurm_of_run", "status_of_files",
]  # fmt: skip


def run_status(run: RunDirectory, answer: Answer | None = None) -> RunStatus:
    """Return the state of a run, or of one task of an array run.

    `answer` is Slurm's response to one query for many runs. Without it, or if it lacks one of `ids_to_ask`, such as a
    job that was submitted later, Slurm is queried now.

    Raises:
        ToolkitError: a file of the run is damaged.
    """
    return status_of_files(read_files(run), answer)


def run_statuses(runs: Iterable[RunDirectory]) -> dict[RunDirectory, RunStatus | ToolkitError]:
    """Return the status of each run, or the error in its files, from one query to each cluster."""
    files = read_files_of(runs)
    answers = query_clusters(files.values())
    statuses: dict[RunDirectory, RunStatus | ToolkitError] = {}
    for run, read in files.items():
        if isinstance(read, ToolkitError):
            statuses[run] = read
            continue
        try:
            with permissions_in_words():
                statuses[run] = status_of_files(read, answers.get(slurm_of_run(read), {}))
        except ToolkitError as error:  # a damaged run must not hide the others
            statuses[run] = error
    return statuses


def own_status(run: RunDirectory) -> RunStatus | None:
    """Return the status of a run from its own files; None if it may be in the queue or running.

    Raises:
        ToolkitError: a file of the run is damaged.
    """
    with permissions_in_words():
        files = read_files(run)
        return status_of_files(files, {}) if files.folder.open_start is None and not ids_to_ask(files) else None


def read_files(run: RunDirectory) -> RunFiles:
    """Return the files of a run that its state depends on.

    Raises:
        ToolkitError: one is damaged, or the run was removed.
    """
    try:
        return read_run(run)
    except FileNotFoundError:
        raise vanished(run) from None


def read_files_of(runs: Iterable[RunDirectory]) -> dict[RunDirectory, RunFiles | ToolkitError]:
    """Return the files of each run, or the error in them."""
    files: dict[RunDirectory, RunFiles | ToolkitError] = {}
    for run in runs:
        try:
            with permissions_in_words():
                files[run] = read_files(run)
        except ToolkitError as error:
            files[run] = error
    return files


def query_clusters(files: Iterable[RunFiles | ToolkitError]) -> dict[Slurm, Answer]:
    """Return each cluster's answer for all of its jobs that may be in the queue or running."""
    wanted: dict[Slurm, list[str]] = {}
    for read in files:
        if not isinstance(read, ToolkitError) and (ids := ids_to_ask(read)):
            wanted.setdefault(slurm_of_run(read), []).extend(ids)
    return {cluster: cluster.query(ids) for cluster, ids in wanted.items()}


def slurm_of_run(files: RunFiles) -> Slurm:
    """Return the Slurm commands for the cluster of a run."""
    return slurm_of_site(files.job.scheduler, cluster=files.job.cluster)


def ids_to_ask(files: RunFiles) -> list[str]:
    """Return the job ids to query: that of the run, or those of array tasks without a final record."""
    job_id = files.job_id
    if not job_id or job_id.startswith("local-") or not files.job.uses_slurm:
        return []
    if not files.is_array:
        return [] if files.folder.final_end is not None else [job_id]
    return [_task_job_id(files, task) for task in _task_numbers(files) if _task_folder(files, task).final_end is None]


def status_of_files(files: RunFiles, answer: Answer | None) -> RunStatus:
    """Return the status of a run whose files were read; `answer` is described in `run_status`."""
    opened, is_absent = "", False
    if answer is not None and has_changed(files):  # it was submitted or resumed during the query for many runs
        files = read_files(files.run)
    if files.folder.open_start is not None:
        from toolkit.runs.status.reconcile_submission import settle

        submission, answer = settle(files.run, slurm_of_run(files)), None
        opened, is_absent = (submission.reason, submission.certain) if submission is not None else ("", False)
        files = read_files(files.run)
    ids = ids_to_ask(files)
    if ids and (not opened or is_absent) and not _covers(answer, ids):
        answer = slurm_of_run(files).query(ids)
    status = decide_state(
        files, answer or {}, read_processes(files), read_progress(files), open_submission=opened, is_absent=is_absent
    )
    if any(one.state.final and one.source != RECORD_SOURCE for one in status.tasks or (status,)):
        # A run or task may have recorded its end after its files were read; this record takes precedence.
        again = read_files(files.run)
        if again.is_array or again.folder.final_end is not None:
            return decide_state(again, answer or {}, read_processes(again), read_progress(again))
    return status


def _covers(answer: Answer | None, ids: Sequence[str]) -> bool:
    return answer is not None and (isinstance(answer, ToolkitError) or set(ids) <= set(answer))


@dataclass(frozen=True)
class Progress:
    """The last step that any file contains, the last validation up to it, and the newest value of each metric."""

    step: int | None = None
    validation: ValidationRecord | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def decide_state(
    files: RunFiles,
    answer: Answer,
    processes: Mapping[RunDirectory, HostFacts] | None = None,
    progress: Progress | None = None,
    *,
    open_submission: str = "",
    is_absent: bool = False,
) -> RunStatus:
    """Return the status that the table of `state_table` gives for a run's files and Slurm's answer. It reads nothing.

    `processes` is what this host knows of each folder, `open_submission` describes a submission without a known job,
    and `is_absent` is true if Slurm certainly has no such job.
    """
    folder, job_id, tasks, code = files.folder, files.job_id, None, None
    processes = processes or {}
    if files.is_array and job_id and (not open_submission or is_absent):
        tasks = tuple(_task_status(files, task, answer, processes) for task in _task_numbers(files))
        report, code = _report_array(files, tasks)
    else:
        here = processes.get(files.run, HostFacts())
        report = report_state(Situation(files, folder, job_id, answer, here, open_submission, is_absent))
        code = _exit_code(folder, report)
    begun = folder.attempt.begun if folder.attempt is not None else None
    # Report the shape of the last attempt or, if a later start was submitted, that of the job.
    has_shape = begun is not None and begun.start >= folder.last_submitted
    nodes, ranks = (begun.nodes, begun.ranks) if begun is not None and has_shape else (files.job.nodes, files.job.ranks)
    progress = progress or Progress()
    counted = [folder] if tasks is None else list(files.tasks.values())
    number = files.run.task_number
    return RunStatus(
        run_id=files.run.run_id, job_name=files.run.job_name, state=report.state, site=files.job.site, job_id=job_id,
        reason=report.reason, source=report.source, nodes=nodes, ranks=ranks,
        starts=sum(len(one.starts) for one in counted), attempts=sum(len(one.attempts) for one in counted),
        step=progress.step, exit_code=code, path=str(files.run.path), tasks=tasks,
        cannot_start=report.cannot_start, validation=progress.validation, metrics=progress.metrics,
        values=files.sweep.values_of(number) if files.sweep is not None and number is not None else None,
        cluster=files.job.cluster,
    )  # fmt: skip


def _report_array(files: RunFiles, tasks: Sequence[TaskStatus]) -> tuple[StateReport, int | None]:
    """Return all tasks as one state, `array 0-9: 3 running, 6 pending, 1 failed`, with the exit code."""
    state, counts, code = summarize_tasks(tasks)
    is_whole = len(parse_array(files.job.array)) == len(tasks)
    array = files.job.array if is_whole else f"of {len(tasks)} tasks"
    open_tasks = [task for task in tasks if not task.state.final]
    hidden = sum(task.state is RunState.COMPLETED and FAILED_INSIDE in task.reason for task in tasks)
    if hidden:
        counts += f"; in {counted(hidden, 'task')} {FAILED_INSIDE}a step failed"
    is_stuck = bool(open_tasks) and all(task.cannot_start for task in open_tasks)
    return StateReport(state, f"array {array}: {counts}", "tasks", is_stuck), code


def _task_status(files: RunFiles, task: int, answer: Answer, processes: Mapping[RunDirectory, HostFacts]) -> TaskStatus:
    """Return the status of one task: from its own final record, or else from Slurm."""
    folder, job_id = _task_folder(files, task), _task_job_id(files, task)
    report = report_state(Situation(files, folder, job_id, answer, processes.get(folder.directory, HostFacts())))
    code = _exit_code(folder, report)
    values = files.sweep.values_of(task) if files.sweep is not None else None
    return TaskStatus(task, job_id, report.state, report.reason, report.source, code, report.cannot_start, values)


def _exit_code(folder: FolderFiles, report: StateReport) -> int | None:
    """Return the exit code that the last attempt recorded; None unless the state is from the same record."""
    return folder.final_end.exit_code if report.source == RECORD_SOURCE and folder.final_end is not None else None


def _task_folder(files: RunFiles, task: int) -> FolderFiles:
    return files.tasks.get(task) or FolderFiles(files.run.task(task))


def _task_job_id(files: RunFiles, task: int) -> str:
    """Return Slurm's job id of a task: that of its last start, else one derived from its position in the array."""
    ids = _task_folder(files, task).job_ids
    return ids[-1] if ids else slurm_id(files.newest_parts, files.job_id, task)


def _task_numbers(files: RunFiles) -> list[int]:
    """Return the tasks of the last and of the first submission, and those that have started: a resume may omit some."""
    first = _parsed(files.first_array, files) if files.whole.resumed else ()
    return sorted({*_parsed(files.job.array, files), *files.tasks, *first})


def _parsed(array: str, files: RunFiles) -> Iterable[int]:
    try:
        return parse_array(array) if array else ()
    except ValueError as error:
        raise ToolkitError(
            f"the record is damaged: {error}", where=f"{files.run.record}:job.array", fix="submit the job again"
        ) from error


def read_processes(files: RunFiles) -> dict[RunDirectory, HostFacts]:
    """Return what this host knows of a run and of each started task, if their states depend on it."""
    folders = {files.folder.directory: (files.folder, files.job_id)}
    if files.is_array:
        folders |= {folder.directory: (folder, _task_job_id(files, task)) for task, folder in files.tasks.items()}
    return {run: _host_facts(*known) for run, known in folders.items() if known[0].final_end is None}


def _host_facts(folder: FolderFiles, job_id: str) -> HostFacts:
    """Return what this host knows of the process that claimed the newest start of a job, or submitted a local one."""
    here = socket.gethostname()
    claims = folder.claims_of(job_id)
    if not claims:
        is_alive = _is_alive(int(job_id.removeprefix("local-")), None) if job_id.startswith("local-") else None
        return HostFacts(here, is_alive)
    claim, has_ended = claims[0]
    if claim.host != here or (has_ended and not job_id.startswith("local-")):
        return HostFacts(here)
    is_alive = _is_alive(claim.pid, claim.process_started)
    return HostFacts(here, is_alive, "" if is_alive else why_full(folder.directory.path))


def _is_alive(pid: int, started: int | None) -> bool:
    try:
        ticks = process_start_ticks(pid)
    except ProcessLookupError:
        return False
    return started is None or ticks == started


def read_progress(files: RunFiles) -> Progress:
    """Return the last step and validation of a run; the step is None before the first attempt.

    The metrics may be ahead of the heartbeat, which is written at most once per second. An attempt without a step is at
    the newest checkpoint, or at the newest metrics of a program whose checkpoints are its own.
    """
    attempt, metrics = files.folder.attempt, files.run.metrics
    if attempt is None:
        return Progress()
    newest = newest_metrics(metrics)
    steps = [
        attempt.step,
        attempt.end.step if attempt.end is not None else None,
        newest.step if newest is not None and newest.attempt == attempt.directory.number else None,
    ]
    known = [step for step in steps if step is not None]
    known = known or [step_of(path) for path in files.run.committed_checkpoints()[-1:]]
    if newest is not None and newest.steps is None:  # of a program with its own loop and checkpoints
        known = known or [newest.step]
    step = max(known, default=None)
    last = last_validation(metrics / "validation.jsonl")
    validation = last if last is not None and step is not None and last.step <= step else None
    return Progress(step, validation, newest.values if newest is not None else {})


def host_of_local_run(run: RunDirectory) -> str:
    """Return the host of a local run: the one that claimed its newest start, else the one that submitted it."""
    files = read_files(run)
    claims = files.folder.claims_of(files.job_id)
    return claims[0][0].host if claims else files.host


def require_task(run: RunDirectory) -> None:
    """Refuse a task that its array run does not have; a task that has not started yet is accepted.

    Raises:
        NotFoundError: the run has no such task.
    """
    files = read_files(run.whole)
    if not files.is_array:
        raise NotFoundError(
            f"run {run.whole.run_id} is not an array, so it has no task {run.task_number}",
            where=str(run.whole.path),
            fix=f"omit the task number: {run.whole.run_id}",
        )
    if run.task_number not in (tasks := _task_numbers(files)):
        raise NotFoundError(
            f"run {run.whole.run_id} has no task {run.task_number}",
            where=str(run.whole.path),
            fix=f"choose one of its tasks, {write_array(tasks)}",
        )


def require_submitted(run: RunDirectory) -> None:
    """Refuse a run that was only rendered: no job will start it.

    Raises:
        CheckFailedError: it was not submitted, and has not started.
    """
    if has_begun(run.whole):
        return
    from toolkit.runs.status.reconcile_submission import was_given_by_hand

    files = read_files(run.whole)
    if files.job.uses_slurm and was_given_by_hand(run.whole, slurm_of_run(files)):
        return
    shell = "sbatch" if files.job.uses_slurm else "bash"
    raise CheckFailedError(
        f"run {run.run_id} was rendered but not submitted", fix=f"`{shell} {shlex.quote(str(run.script(0)))}`"
    )

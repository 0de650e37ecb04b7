"""Resume a run: prepare its next start from the newest or a named checkpoint, on the same or another number of nodes.

A start is one execution of the run's script. The first submission is start 0; a requeue or a resume adds one.
"""

import os
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.config.amend import amend_job, move_job
from toolkit.config.document import Flag
from toolkit.config.entry import files_of_entry
from toolkit.config.resolved import ResolvedJob, shown_arguments
from toolkit.config.site import Site
from toolkit.errors import CheckFailedError, NotFoundError, ToolkitError
from toolkit.rundir.bad_nodes import runs_of
from toolkit.rundir.files import read_json, utc_now, write_json, write_text
from toolkit.rundir.find import array_in
from toolkit.rundir.layout import RunDirectory, start_of
from toolkit.rundir.states import RunState
from toolkit.rundir.sweep import read_sweep
from toolkit.runs.record.code_snapshot import remove_snapshot
from toolkit.runs.record.job import recorded_job, sbatch_words, site_of
from toolkit.runs.record.parents import Parent, dependency_options, record_of
from toolkit.runs.status.reconcile_submission import array_of_first_start, tasks_in
from toolkit.runs.status.state import require_submitted, run_status
from toolkit.runs.status.state_table import RunStatus, state_phrase
from toolkit.slurm.submit import SETTLE_S
from toolkit.submission.preflight.beginning import (
    check_adapter_files,
    check_arguments,
    check_bench,
    check_codec,
    check_data,
    check_guard,
    check_model_folder,
    check_source,
    check_whole,
)
from toolkit.submission.preflight.secrets import check_secrets
from toolkit.submission.preflight.unpassed import warn_of_args
from toolkit.submission.resume_checks import check_components, check_site, check_steps_left, check_tasks
from toolkit.submission.script import NewCode, is_rerun, nodes_to_exclude, render_script
from toolkit.submission.sweep.sweep import resolve_again
from toolkit.supervise.launch import is_unmanaged
from toolkit.terminal.talk import say

__all__ = ["Changes", "NextStart", "prepare_resume", "undo_resume"]

SILENCE_S = 600.0  # --job-gone requires that the run has written nothing for this time


@dataclass(frozen=True)
class NextStart:
    """A start that is recorded but not yet submitted, and the files that `undo_resume` restores."""

    part: RunDirectory  # the run, or the task that is resumed alone
    number: int
    job: ResolvedJob
    requests: Mapping[Path, str]  # content of stop and cancel requests to earlier starts, by file
    closed: Sequence[Path]  # `lost.json` of starts whose supervisor vanished


@dataclass(frozen=True)
class Changes:
    """The changes of a resume from the previous start.

    `settings` and `flags` replace recorded values, as for a submit. `sbatch` are options for this submission only.
    `checkpoint` is a step number, a folder name or a path, None for the newest valid one. `site` is another site, or
    the same one with its current file. `same_code` uses the code of the last start, not the current job folder. `after`
    are the runs that this start follows. `argv` replaces the arguments after `--` unless it is None. `job_gone` is the
    user's statement that the old job ended with its cluster, which can no longer be queried.
    """

    settings: Sequence[str] = ()
    flags: Mapping[str, Flag] = field(default_factory=dict)
    sbatch: Sequence[str] = ()
    checkpoint: str | None = None
    site: Site | None = None
    same_code: bool = False
    after: Sequence[Parent] = ()
    job_gone: bool = False
    argv: Sequence[str] | None = None


def prepare_resume(run: RunDirectory, changes: Changes | None = None) -> NextStart:
    """Write the script of the run's next start. If it is not submitted, `undo_resume` undoes everything.

    A task of an array is resumed as an array of that task alone, which is a start of its whole run.

    Raises:
        CheckFailedError: the run is active, its state is unknown, it was never submitted, or another
            resume is submitting it.
        NotFoundError: there is no such checkpoint.
        ToolkitError: a value is wrong, or the site cannot serve the new shape.
    """
    changes = changes or Changes()
    require_submitted(run)
    number = _next_number(run.whole)
    # Check after counting the starts: a concurrent resume is then detected here, or when the number is claimed.
    status = _require_ended(run.whole, job_gone=changes.job_gone)
    source = find_checkpoint(run, changes.checkpoint) if changes.checkpoint is not None else None
    if source is not None:
        check_whole(source, where="--from")  # checked before newer checkpoints are archived
    job = _changed_job(run, status, changes, source)
    sweep = read_sweep(run)
    task_overrides = (
        resolve_again(job, changes.site or site_of(job), sweep).task_overrides if sweep is not None else None
    )
    code = NewCode(job, run.whole, number)
    job = code.job
    try:
        _claim_number(run.whole, number, job, code.record, changes.after)
    except BaseException:
        code.discard()
        raise
    code.put_in_place()
    parts = run.with_tasks()
    prepared = NextStart(run, number, job, _requests_of(parts), _lost_starts_of(parts))
    try:
        excluded = nodes_to_exclude(job, runs_of(run.whole))
        options = [*changes.sbatch, *dependency_options(changes.after, [*sbatch_words(job), *changes.sbatch])]
        script = render_script(
            job, run.whole, number, excluded=excluded, extra_sbatch_options=options, task_overrides=task_overrides,
            whole_array=array_of_first_start(run.whole),
        )  # fmt: skip
        write_text(run.whole.script(number), script, mode=0o700)
    except (ToolkitError, OSError):
        undo_resume(prepared)
        raise
    if source is not None:
        archive_newer_checkpoints(run, source, number)
    _put_away(prepared)
    return prepared


def _next_number(whole: RunDirectory) -> int:
    """Return the number after all starts that were submitted, or that a task of the run has begun."""
    submitted = map(start_of, whole.path.glob("submitt*-*.json"))
    begun = [part.start_numbers() for part in whole.with_tasks()]
    return max([-1, *submitted, *(number for numbers in begun for number in numbers)]) + 1


def _require_ended(whole: RunDirectory, *, job_gone: bool) -> RunStatus:
    """Return the status of an ended run. All tasks must have ended, because waiting ones know only the newest job."""
    status = run_status(whole)
    if job_gone and status.state is RunState.UNKNOWN:
        _require_silence(whole)
    elif not status.state.final:
        raise CheckFailedError(
            f"run {whole.run_id} {state_phrase(status.state)} ({status.reason})", fix=_fix_of_living(whole, status)
        )
    return status


def _require_silence(whole: RunDirectory) -> None:
    """Refuse --job-gone for a run that has written something recently.

    If the job reappears later, it is fenced off: it can neither begin a start nor continue an older one.
    """
    watched = [place for part in whole.with_tasks() for place in _written_by_living(part)]
    newest = max(watched, key=lambda path: path.stat().st_mtime, default=None)
    silent_s = time.time() - newest.stat().st_mtime if newest is not None else float("inf")
    if newest is not None and silent_s < SILENCE_S:
        raise CheckFailedError(
            f"run {whole.run_id} is still active: it wrote {newest.relative_to(whole.path)} {silent_s:.0f} s ago",
            where="--job-gone",
            fix=f"`toolkit cancel {whole.run_id}`, and retry when it has written nothing for {SILENCE_S:.0f} s",
        )


def _written_by_living(part: RunDirectory) -> list[Path]:
    """Return the files that ranks and supervisor write while they are active: logs, heartbeats, metrics."""
    places = ("slurm-*.out", "metrics/*", "starts/*/*", "attempts/*/*", "attempts/*/logs/*")
    return [path for place in places for path in part.path.glob(place) if path.is_file()]


def _fix_of_living(whole: RunDirectory, status: RunStatus) -> str:
    if status.state is RunState.UNKNOWN:  # a later query may find that Slurm has no such job
        return (
            f"repeat `toolkit status {whole.run_id}` after {SETTLE_S:.0f} s, or `toolkit cancel {whole.run_id}`; if its "
            f"cluster is gone for good, `toolkit resume {whole.run_id} --site OTHER --job-gone`"
        )
    return f"wait for it, or `toolkit cancel {whole.run_id}`"


def _changed_job(run: RunDirectory, status: RunStatus, changes: Changes, source: Path | None) -> ResolvedJob:
    recorded = recorded_job(run)
    if changes.same_code:
        _require_copy(run, recorded)
    elif not is_rerun(run):
        recorded = recorded.model_copy(update={"code_directory": None})
    _report_differences(run, recorded, changes.argv)
    if changes.argv is not None:
        recorded = recorded.model_copy(update={"argv": list(changes.argv)})
    check_site(run, recorded, changes.site)
    check_components(run, recorded, [*changes.flags, *(setting.partition("=")[0] for setting in changes.settings)])
    named = "job.array" in changes.flags or any(setting.startswith("job.array=") for setting in changes.settings)
    flags = ({} if named else _tasks_to_resume(run, recorded, status)) | dict(changes.flags)
    before = move_job(recorded, changes.site, os.environ) if changes.site is not None else recorded
    job = amend_job(before, site=changes.site or site_of(recorded), settings=changes.settings, flags=flags)
    check_tasks(run, recorded, job)
    check_data(job, changes.sbatch)
    check_codec(job)
    check_arguments(job)
    check_model_folder(job, changes.sbatch)
    check_bench(job)
    check_guard(job, has_checkpoint=source is not None or _has_checkpoints(run))
    check_secrets(job, os.environ)
    warn_of_args(job)
    if source is None:
        if job.checkpoint.source != recorded.checkpoint.source or not _has_checkpoints(run):
            check_source(job, changes.sbatch)
    else:
        job = _begun_from(job, run, source)
    if job.adapters != recorded.adapters:
        check_adapter_files(job, changes.sbatch)
    if recorded.job.tasks is None or run.task_number is not None:  # each task of an array counts its own steps
        ended = status if run.task_number is None else run_status(run)
        completed = ended.state is RunState.COMPLETED
        check_steps_left(run, recorded, job, source, completed=completed)
        if completed:
            _tell_of_completed(run, source)
    return job


def _report_differences(run: RunDirectory, recorded: ResolvedJob, argv: Sequence[str] | None) -> None:
    """Report other arguments, and another working directory, in which a script would not find its files."""
    if argv is not None and recorded.argv and list(argv) != recorded.argv:
        new, old = (shlex.join(shown_arguments(list(one))) for one in (argv, recorded.argv))
        say(
            f"the arguments after `--` are now {new or 'none'}, no longer {old}; those of every start belong into job.argv"
        )
    folder = str(read_json(run.whole.record).get("working_directory") or "")
    if folder and folder != str(Path.cwd()) and is_unmanaged(recorded.job.entry):
        say(f"the ranks start in {Path.cwd()}; the first start of the run was in {folder}")


def _tell_of_completed(run: RunDirectory, source: Path | None) -> None:
    """Report that the run had completed: a resume is seldom intended then, although its script may have more to do."""
    newest = source or next(iter(run.committed_checkpoints()[-1:]), None)
    begins = "starts from the beginning, because it has no checkpoint"
    if newest is not None:
        begins = f"continues from {newest.name}"
    elif is_unmanaged(recorded_job(run).job.entry):
        begins = "starts again and must restore any state that it saved itself"
    say(
        f"run {run.run_id} had completed; it now {begins}, in the same folder. `toolkit rerun {run.run_id}` repeats it as "
        "a new run"
    )


def _require_copy(run: RunDirectory, recorded: ResolvedJob) -> None:
    if recorded.code_directory is None and files_of_entry(recorded):
        raise CheckFailedError(
            f"run {run.whole.run_id} has no copy of its code to run again",
            where="--same-code",
            fix=f"omit --same-code, after you checked the code in {recorded.job_directory}",
        )


def _begun_from(job: ResolvedJob, run: RunDirectory, source: Path) -> ResolvedJob:
    # No origin is recorded, so that the next resume uses the newest checkpoint again.
    update: dict[str, Any] = {"source": str(source)}
    if source.is_relative_to(run.path.resolve()):  # resume all state, even if the run first took only weights
        update |= {"take": "all", "without": []}
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update=update)})


def _has_checkpoints(run: RunDirectory) -> bool:
    """Return whether the run has checkpoints: if so, it continues from those, not from the one that it started with."""
    return any(part.committed_checkpoints() for part in run.with_tasks())


def _requests_of(parts: Sequence[RunDirectory]) -> dict[Path, str]:
    flags = [part.control / flag for part in parts for flag in ("stop", "kill", "cancel")]
    return {flag: flag.read_text(encoding="utf-8") for flag in flags if flag.exists()}


def _lost_starts_of(parts: Sequence[RunDirectory]) -> list[Path]:
    """Return the `lost.json` to write for starts without a recorded end, whose supervisor vanished."""
    starts = (part.start(number) for part in parts for number in part.start_numbers())
    return [
        start / "lost.json"
        for start in starts
        if not any((start / name).exists() for name in ("end.json", "lost.json"))
    ]


def _put_away(prepared: NextStart) -> None:
    """Remove requests to earlier starts, and mark starts without a recorded end as lost."""
    for flag in prepared.requests:
        flag.unlink(missing_ok=True)
    for path in prepared.closed:
        write_json(path, {"time": utc_now(), "note": "closed by resume: its job was over"})


def _tasks_to_resume(run: RunDirectory, recorded: ResolvedJob, status: RunStatus) -> dict[str, Flag]:
    """Return the array of the one task, or of the incomplete tasks; the caller lets a user's own array override it.

    Raises:
        CheckFailedError: all of them have completed.
    """
    if recorded.job.tasks is None:
        return {}
    if run.task_number is not None:
        return {"job.array": Flag(str(run.task_number), "the task that is resumed")}
    tasks = status.tasks or ()
    left = [task.task for task in tasks if task.state is not RunState.COMPLETED]
    if not left:
        numbers = sorted(task.task for task in tasks)
        everything = array_in(run.record) if numbers == sorted(tasks_in(run.record)) else ",".join(map(str, numbers))
        raise CheckFailedError(
            f"all {len(tasks)} tasks of run {run.run_id} have completed; there is nothing to resume",
            where=str(run.path),
            fix=f"`toolkit resume {run.run_id} --set job.array={everything}` runs all of them again",
        )
    if left == sorted(recorded.job.tasks):
        return {}
    at_once = f"%{recorded.job.tasks.at_once}" if recorded.job.tasks.at_once else ""
    if len(left) < len(tasks):
        say(f"resuming {len(left)} of {len(tasks)} tasks; the others have completed")
    return {"job.array": Flag(",".join(map(str, left)) + at_once, "the tasks that are not completed")}


def _claim_number(
    run: RunDirectory, start: int, job: ResolvedJob, code: Mapping[str, Any], after: Sequence[Parent]
) -> None:
    """Create `resumed-SSS.json` atomically and only once, so that only one of two concurrent resumes gets the start."""
    path = run.resumed(start)
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    resumed = {"time": utc_now(), "job": job.model_dump(mode="json", by_alias=True), "code": code}
    write_json(draft, resumed | record_of(after))
    try:
        os.link(draft, path)
    except FileExistsError:
        raise CheckFailedError(
            f"start {start} of run {run.run_id} is being submitted by another resume",
            where=str(path),
            fix=f"`toolkit status {run.run_id}`; if that resume was killed, remove {path.name}",
        ) from None
    finally:
        draft.unlink()


def undo_resume(prepared: NextStart) -> None:
    """Undo what `prepare_resume` did for a start that was refused.

    An archived checkpoint keeps its new name if the old name exists again.
    """
    part, start = prepared.part, prepared.number
    for flag, words in prepared.requests.items():
        if not flag.exists():
            write_text(flag, words)
    for path in prepared.closed:
        path.unlink(missing_ok=True)
    suffix = f".aside-{start:03}"
    for aside in sorted(part.checkpoints.glob(f"step-*{suffix}")):
        path = aside.with_name(aside.name.removesuffix(suffix))
        if not path.exists():
            aside.rename(path)
            say(f"renamed {aside.name} back to {path.name}")
    part.whole.script(start).unlink(missing_ok=True)
    remove_snapshot(part.whole.code(start))
    part.whole.resumed(start).unlink(missing_ok=True)  # last, because it claims the number


def find_checkpoint(run: RunDirectory, name: str) -> Path:
    """Return a checkpoint by step, folder name or path."""
    candidates = [Path(name), run.checkpoints / name]
    if name.isdigit():
        candidates.append(run.checkpoints / f"step-{int(name):08}")
    for path in candidates:
        if (path / "manifest.json").exists():
            return path.resolve()
    there = ", ".join(path.name for path in run.committed_checkpoints())
    raise NotFoundError(
        f"no checkpoint {name!r}",
        where=str(run.checkpoints),
        fix=f"choose one of {there}" if there else "omit --from: this run has no checkpoints",
    )


def archive_newer_checkpoints(run: RunDirectory, source: Path, start: int) -> None:
    """Rename the run's checkpoints that are newer than `source`, so that ranks continue from it; nothing is deleted.

    For a checkpoint of another run, all checkpoints of this run are archived. The start `start` resumes from `source`.
    """
    inside = source.parent == run.checkpoints.resolve()
    for path in run.committed_checkpoints():
        if not inside or path.name > source.name:
            aside = path.with_name(f"{path.name}.aside-{start:03}")
            path.rename(aside)
            say(f"the run continues from {source}; renamed {path.name} to {aside.name}")

"""Resume: a new Slurm job of the same run, maybe of another shape, from its newest or a named checkpoint."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.batch.bad_nodes import nodes_left_out
from toolkit.batch.script import render_script
from toolkit.batch.state import RunStatus, require_submitted, run_status
from toolkit.batch.submission import recorded_job
from toolkit.config.amend import amend_job
from toolkit.config.origins import Flag
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.errors import CheckFailedError, NotFoundError, ToolkitError
from toolkit.rundir.bad_nodes import runs_of
from toolkit.rundir.files import utc_now, write_json, write_text
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.site.load import load_site


def prepare_resume(
    run: RunDirectory, *, settings: Sequence[str] = (), flags: Mapping[str, Flag] | None = None, checkpoint: str | None = None,
    sbatch: Sequence[str] = (),
) -> tuple[ResolvedJob, int]:  # fmt: skip
    """Write the script of the run's next start; returns its job and its start number.

    A task of an array is resumed as an array of that task alone, which is a start of its whole run.

    Args:
        settings, flags: values that replace recorded ones, as for a submit.
        checkpoint: a step number, a folder's name or a path; None takes the newest that verifies.

    Raises:
        CheckFailedError: the run still lives, nobody knows whether it does, it was never submitted, or another
            resume is submitting it.
        NotFoundError: there is no such checkpoint.
        ToolkitError: a value is wrong, or the site cannot serve the new shape.
    """
    require_submitted(run)
    whole = run.whole
    starts = [part.start_numbers() for part in (whole, *map(whole.task, whole.task_numbers()))]
    start = max([-1, *_submitted_starts(whole), *(number for numbers in starts for number in numbers)]) + 1
    # After the count: a resume that was done in between is seen here or at the claim. Of an array all tasks must have
    # ended: those that wait know their job only from the run's newest submission.
    status = run_status(whole)
    if not status.state.final:
        raise CheckFailedError(
            f"run {whole.run_id} is {status.state.value} ({status.reason})",
            fix=f"wait for it, or `toolkit cancel {whole.run_id}`",
        )
    recorded = recorded_job(run)
    flags = _tasks_to_resume(run, recorded, status, settings) | dict(flags or {})
    job = amend_job(recorded, site=site_of(recorded), settings=settings, flags=flags).with_sbatch(sbatch)
    source = find_checkpoint(run, checkpoint) if checkpoint is not None else None
    if source is not None:
        # Without an origin of its own: the next resume takes the newest checkpoint again.
        job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"source": str(source)})})
    _claim_number(whole, start, job)
    try:
        left_out = nodes_left_out(job, runs_of(whole))
        write_text(whole.script(start), render_script(job, whole, start, left_out=left_out), mode=0o700)
    except ToolkitError:
        take_back(whole, start)
        raise
    if source is not None:
        set_aside_newer(run, source, start)
    for part in (run, *map(run.task, run.task_numbers())):
        _forget_the_end(part)
    return job, start


def _forget_the_end(part: RunDirectory) -> None:
    """What was asked of the lives before does not count for the next one."""
    for flag in ("stop", "cancel"):
        (part.control / flag).unlink(missing_ok=True)
    _close_lost_starts(part)


def _tasks_to_resume(
    run: RunDirectory, recorded: ResolvedJob, status: RunStatus, settings: Sequence[str]
) -> dict[str, Flag]:
    """The array of one task, or of those that are not completed where some are; the user's own words win."""
    if recorded.job.tasks is None or any(setting.startswith("job.array=") for setting in settings):
        return {}
    if run.task_number is not None:
        return {"job.array": Flag(str(run.task_number), "the task that is resumed")}
    tasks = status.tasks or ()
    left = [task.task for task in tasks if task.state is not RunState.COMPLETED] or [task.task for task in tasks]
    if left == sorted(recorded.job.tasks):
        return {}
    at_once = f"%{recorded.job.tasks.at_once}" if recorded.job.tasks.at_once else ""
    sys.stderr.write(f"toolkit: {len(left)} of {len(tasks)} tasks go on; completed ones stay as they are\n")
    return {"job.array": Flag(",".join(map(str, left)) + at_once, "the tasks that are not completed")}


def _claim_number(run: RunDirectory, start: int, job: ResolvedJob) -> None:
    """Write `resumed-SSS.json` whole and only once: of two resumes at the same time one has the start."""
    path = run.path / f"resumed-{start:03}.json"
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    write_json(draft, {"time": utc_now(), "job": job.model_dump(mode="json", by_alias=True)})
    try:
        os.link(draft, path)
    except FileExistsError:
        raise CheckFailedError(
            f"start {start} of run {run.run_id} is being submitted by another resume",
            where=str(path),
            fix=f"`toolkit status {run.run_id}`; remove this file if that resume was killed",
        ) from None
    finally:
        draft.unlink()


def take_back(run: RunDirectory, start: int) -> None:
    """Undo what `prepare_resume` did for a start that the scheduler refused; nothing of it must last.

    A checkpoint that it set aside stays so where its name is taken again.
    """
    suffix = f".aside-{start:03}"
    for aside in sorted(run.checkpoints.glob(f"step-*{suffix}")):
        path = aside.with_name(aside.name.removesuffix(suffix))
        if not path.exists():
            aside.rename(path)
            sys.stderr.write(f"toolkit: {aside.name} is {path.name} again\n")
    run.script(start).unlink(missing_ok=True)
    (run.path / f"resumed-{start:03}.json").unlink(missing_ok=True)  # last: it is the claim of the number


def site_of(recorded: ResolvedJob) -> Site:
    """The site of a recorded job: its file as it was named then (`--site PATH`), else by its name."""
    path = recorded.origin("site.name").detail.rpartition(":")[0]
    return load_site(path if path and Path(path).is_file() else recorded.site.name)


def find_checkpoint(run: RunDirectory, name: str) -> Path:
    """A checkpoint by step, folder name or path."""
    candidates = [Path(name), run.checkpoints / name]
    if name.isdigit():
        candidates.append(run.checkpoints / f"step-{int(name):08}")
    for path in candidates:
        if (path / "manifest.json").exists():
            return path.resolve()
    there = ", ".join(
        sorted(path.name for path in run.checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit())
    )
    raise NotFoundError(
        f"no checkpoint {name!r}",
        where=str(run.checkpoints),
        fix=f"there are: {there}" if there else "this run has none",
    )


def set_aside_newer(run: RunDirectory, source: Path, start: int) -> None:
    """Rename the run's checkpoints that are newer than `source`, so that ranks go on from it; nothing is deleted.

    Of another run's checkpoint none of this run's is known to be older, so all are set aside. `start` is the start
    that begins from `source`.
    """
    inside = source.parent == run.checkpoints.resolve()
    for path in sorted(run.checkpoints.glob("step-*")):
        if path.name.removeprefix("step-").isdigit() and (not inside or path.name > source.name):
            aside = path.with_name(f"{path.name}.aside-{start:03}")
            path.rename(aside)
            sys.stderr.write(f"toolkit: the run goes on from {source}; {path.name} is now {aside.name}\n")


def _submitted_starts(run: RunDirectory) -> list[int]:
    return [int(path.stem.split("-")[1]) for path in run.path.glob("submitt*-*.json")]


def _close_lost_starts(run: RunDirectory) -> None:
    """A start whose supervisor vanished did not say that it ended; its job is over, so the next may begin."""
    for number in run.start_numbers():
        if not (run.start(number) / "end.json").exists():
            write_json(
                run.start(number) / "lost.json", {"time": utc_now(), "note": "closed by resume: its job was over"}
            )

"""Resume: a new Slurm job of the same run, maybe of another shape, from its newest or a named checkpoint."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.batch.bad_nodes import nodes_left_out
from toolkit.batch.script import render_script
from toolkit.batch.state import require_submitted, run_status
from toolkit.batch.submission import recorded_job
from toolkit.config.amend import amend_job
from toolkit.config.origins import Flag
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.errors import CheckFailedError, NotFoundError, ToolkitError
from toolkit.rundir.bad_nodes import runs_of
from toolkit.rundir.files import utc_now, write_json, write_text
from toolkit.rundir.layout import RunDirectory
from toolkit.site.load import load_site


def prepare_resume(
    run: RunDirectory, *, settings: Sequence[str] = (), flags: Mapping[str, Flag] | None = None, checkpoint: str | None = None,
    sbatch: Sequence[str] = (),
) -> tuple[ResolvedJob, int]:  # fmt: skip
    """Write the script of the run's next start; returns its job and its start number.

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
    start = max([-1, *run.start_numbers(), *_submitted_starts(run)]) + 1
    status = run_status(
        run
    )  # after the count: a resume that was done in between is seen here or at the claim
    if not status.state.final:
        raise CheckFailedError(
            f"run {run.run_id} is {status.state.value} ({status.reason})",
            fix=f"wait for it, or `toolkit cancel {run.run_id}`",
        )
    recorded = recorded_job(run)
    job = amend_job(recorded, site=site_of(recorded), settings=settings, flags=flags).with_sbatch(sbatch)
    source = find_checkpoint(run, checkpoint) if checkpoint is not None else None
    if source is not None:
        # Without an origin of its own: the next resume takes the newest checkpoint again.
        job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"source": str(source)})})
    _claim_number(run, start, job)
    try:
        left_out = nodes_left_out(job, runs_of(run))
        write_text(run.script(start), render_script(job, run, start, left_out=left_out), mode=0o700)
    except ToolkitError:
        take_back(run, start)
        raise
    if source is not None:
        set_aside_newer(run, source, start)
    for flag in ("stop", "cancel"):
        (run.control / flag).unlink(missing_ok=True)
    _close_lost_starts(run)
    return job, start


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
        sorted(
            path.name for path in run.checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit()
        )
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
                run.start(number) / "lost.json",
                {"time": utc_now(), "note": "closed by resume: its job was over"},
            )

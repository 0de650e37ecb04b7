"""Checks before a resume: settings that a resume cannot change, and whether training steps remain."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config.layout_checks import SHAPE
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.errors import CheckFailedError, ToolkitError, counted
from toolkit.metrics.training import last_record
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.status.reconcile_submission import array_of_first_start
from toolkit.slurm.array import parse_array, write_array
from toolkit.terminal.talk import say

if TYPE_CHECKING:
    from toolkit.checkpoint.format.manifest import Manifest

__all__ = ["check_components", "check_site", "check_steps_left", "check_tasks"]


def check_site(run: RunDirectory, recorded: ResolvedJob, site: Site | None) -> None:
    """Refuse a site without a scheduler for a run that needs one.

    Raises:
        ToolkitError: the run is an array, or has several components.
    """
    if site is None or site.scheduler.kind != "local":
        return
    several = "an array" if recorded.job.tasks is not None else "heterogeneous" if recorded.component else ""
    if several:
        raise ToolkitError(
            f"run {run.whole.run_id} is {several}, but site {site.name} has no scheduler for it",
            where=f"--site {site.name}", fix="omit --site, or pass the name of a cluster",
        )  # fmt: skip


def check_components(run: RunDirectory, recorded: ResolvedJob, keys: Iterable[str]) -> None:
    """Refuse new values for keys that the components set: a command-line option cannot name a component.

    Raises:
        ToolkitError: a component sets one of `keys`, such as `job.nodes`.
    """
    stated = set(SHAPE).union(*(table.stated for table in recorded.component)) if recorded.component else set()
    for key in keys:
        if key.removeprefix("job.") in stated:
            raise ToolkitError(
                f"cannot be changed: run {run.run_id} has {len(recorded.component)} components, each with its own value",
                where=key,
                fix=f"omit {key}. For another shape, edit a copy of the job file and submit that as a new run with "
                f"--set checkpoint.source=FOLDER; `toolkit ckpt ls {run.run_id}` lists the folders",
            )


def check_tasks(run: RunDirectory, recorded: ResolvedJob, job: ResolvedJob) -> None:
    """Refuse to resume an array as a single job, or the reverse: each task has its own checkpoint folder.

    Report tasks that the first start did not have, because a program that divides work by their count would skip it.

    Raises:
        ToolkitError: the run is an array and the new job is not, or the reverse.
    """
    was_array, place = recorded.job.tasks is not None, job.origin("job.array").place("job.array")
    name = run.whole.run_id
    if was_array == (job.job.tasks is not None):
        first = array_of_first_start(run.whole)
        if new := sorted(set(job.job.tasks or ()) - set(parse_array(first) if first else ())):
            say(
                f"tasks {write_array(new)} are new: SLURM_ARRAY_TASK_COUNT, _MIN, _MAX and _STEP stay those of the first start "
                f"({first}); if the program reads them, `toolkit rerun {name} -a {job.job.array}`"
            )
        return
    if was_array:
        raise ToolkitError(
            f"run {name} is an array and cannot be resumed as a single job", where=place,
            fix=f"omit job.array; `toolkit resume {name}_T` resumes task T alone",
        )  # fmt: skip
    raise ToolkitError(
        f"run {name} is not an array and cannot be resumed as one: its checkpoints belong to no task", where=place,
        fix=f"omit job.array, or `toolkit rerun {name} -a {job.job.array}`",
    )  # fmt: skip


_KEY, _PATIENCE = "train.steps", "train.early_stop_patience"


def check_steps_left(
    run: RunDirectory, recorded: ResolvedJob, job: ResolvedJob, source: Path | None, *, completed: bool
) -> None:
    """Refuse a resume without remaining steps: the run has reached `train.steps`, or it stopped early.

    A run that failed after its last step may have other work left: toolkit reports that, and does not refuse it.

    Args:
        recorded, job: the job as it was last submitted, and as it will be resumed.
        source: the checkpoint to resume from; None for the newest one.
        completed: whether the run has completed.

    Raises:
        CheckFailedError: no steps remain.
    """
    begins_at = _begins_at(run, job, source)
    if begins_at is None:
        return
    step = begins_at.step
    if step < job.train.steps or not _obeys_the_key(run, recorded, job):
        _check_patience_left(run, recorded, job, begins_at, completed=completed)
        return
    if not completed and job.train.steps == recorded.train.steps:
        say(f"run {run.run_id} has completed all {step} steps; only the work after the last step remains")
        return
    more = step + job.train.steps
    raise CheckFailedError(
        f"run {run.run_id} is at step {step}, and train.steps is {job.train.steps}: no steps remain",
        where=_place(_KEY, recorded, job),
        fix=f"`toolkit resume {run.run_id} --set train.steps={more}` adds {job.train.steps} steps; --from CKPT repeats earlier ones",
    )


def _place(key: str, recorded: ResolvedJob, job: ResolvedJob) -> str:
    """Return where a key was set; a flag that was given at the last start, not now, is marked as such."""
    origin = job.origin(key)
    was_typed = origin.layer in ("TOOLKIT_*", "flag") and origin == recorded.origin(key)
    return f"{origin.place(key)} at the last start" if was_typed else origin.place(key)


def _check_patience_left(
    run: RunDirectory, recorded: ResolvedJob, job: ResolvedJob, begins_at: Manifest, *, completed: bool
) -> None:
    """Refuse to continue a run that has stopped early, unless its patience is increased."""
    patience, waited = job.train.early_stop_patience, _waited(begins_at)
    if not completed or not patience or waited < patience:
        return
    raise CheckFailedError(
        f"run {run.run_id} stopped early at step {begins_at.step}: no improvement in {counted(waited, 'validation')}, and "
        f"{_PATIENCE} is {patience}: no steps remain",
        where=_place(_PATIENCE, recorded, job),
        fix=f"`toolkit resume {run.run_id} --set {_PATIENCE}={waited + patience}` allows {patience} more, 0 any number; "
        "--from CKPT resumes from an earlier checkpoint",
    )


def _waited(manifest: Manifest) -> int:
    """Return the number of validations without improvement that `toolkit.train.early_stop` saved, or 0."""
    extra = manifest.state.get("extra")
    kept = extra.get("early_stop") if isinstance(extra, dict) else None
    waited = kept.get("waited") if isinstance(kept, dict) else None
    return waited if isinstance(waited, int) else 0


def _begins_at(run: RunDirectory, job: ResolvedJob, source: Path | None) -> Manifest | None:
    """Return the checkpoint to resume from; None if the ranks start at step 0, or if only they can choose it."""
    from toolkit.checkpoint.folder.choice import good_manifest

    chosen = source or next(iter(run.committed_checkpoints()[-1:]), None)
    if chosen is None or (source is not None and job.checkpoint.take == "weights"):
        return None
    try:
        return good_manifest(chosen)
    except (ToolkitError, OSError):  # the ranks choose an older one, or only they can read it
        return None


def _obeys_the_key(run: RunDirectory, recorded: ResolvedJob, job: ResolvedJob) -> bool:
    """Return whether `train.steps` limits the run: it was set, or the metrics contain it. A script may ignore it."""
    record = last_record(run.metrics / "train.jsonl")
    return _KEY in job.origins or (record is not None and record.steps == recorded.train.steps)

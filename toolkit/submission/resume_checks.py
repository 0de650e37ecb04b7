"""Checks before a resume: what it cannot change of a run, and whether the run has steps left."""

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
    several = "an array" if recorded.job.tasks is not None else "of several components" if recorded.component else ""
    if several:
        raise ToolkitError(
            f"run {run.whole.run_id} is {several}, and site {site.name} has no scheduler that could start it",
            where=f"--site {site.name}", fix="omit --site, or pass the name of a cluster",
        )  # fmt: skip


def check_components(run: RunDirectory, recorded: ResolvedJob, keys: Iterable[str]) -> None:
    """Refuse new values of keys that each component sets: a command line cannot name the component.

    Raises:
        ToolkitError: one of `keys`, as in `job.nodes`, is such a key.
    """
    stated = set(SHAPE).union(*(table.stated for table in recorded.component)) if recorded.component else set()
    for key in keys:
        if key.removeprefix("job.") in stated:
            raise ToolkitError(
                f"run {run.run_id} has {len(recorded.component)} components, and each has its own",
                where=key,
                fix="omit it; another shape is a new run: change a copy of the job file, and `toolkit submit` that "
                f"with --set checkpoint.source=FOLDER, one of `toolkit ckpt ls {run.run_id}`",
            )


def check_tasks(run: RunDirectory, recorded: ResolvedJob, job: ResolvedJob) -> None:
    """Refuse to turn tasks into one job, or one job into tasks: each has a checkpoint folder of its own.

    Raises:
        ToolkitError: the run is an array and the new job is not, or the reverse.
    """
    was_array, place = recorded.job.tasks is not None, job.origin("job.array").place("job.array")
    if was_array == (job.job.tasks is not None):
        return
    name = run.whole.run_id
    if was_array:
        raise ToolkitError(
            f"run {name} is an array, and its tasks stay tasks", where=place,
            fix=f"omit it; `toolkit resume {name}_T` continues task T alone",
        )  # fmt: skip
    raise ToolkitError(
        f"run {name} is not an array, and its checkpoints belong to no task", where=place,
        fix=f"omit it, or `toolkit rerun {name} -a {job.job.array}`",
    )  # fmt: skip


_KEY, _PATIENCE = "train.steps", "train.early_stop_patience"


def check_steps_left(
    run: RunDirectory, recorded: ResolvedJob, job: ResolvedJob, source: Path | None, *, completed: bool
) -> None:
    """Refuse a resume whose ranks would leave at once: the run is at `train.steps` or beyond it, or has stopped early.

    A run that failed behind its last step may have work left there: that is told, and not refused.

    Args:
        recorded, job: as the run was submitted last, and as it is resumed.
        source: the checkpoint that it is to go on from; None for its newest.
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
        say(f"run {run.run_id} has made all {step} steps; only what follows them remains")
        return
    more = step + job.train.steps
    raise CheckFailedError(
        f"run {run.run_id} is at step {step}, and train.steps is {job.train.steps}: no steps remain",
        where=_place(_KEY, recorded, job),
        fix=f"`toolkit resume {run.run_id} --set train.steps={more}` makes {job.train.steps} more; --from CKPT goes back",
    )


def _place(key: str, recorded: ResolvedJob, job: ResolvedJob) -> str:
    """Return where a key was set; for a flag of the last start it says so, since the user did not type it now."""
    origin = job.origin(key)
    was_typed = origin.layer in ("TOOLKIT_*", "flag") and origin == recorded.origin(key)
    return f"{origin.place(key)} of its last start" if was_typed else origin.place(key)


def _check_patience_left(
    run: RunDirectory, recorded: ResolvedJob, job: ResolvedJob, begins_at: Manifest, *, completed: bool
) -> None:
    """Refuse to continue a run that has stopped early, unless its patience is increased."""
    patience, waited = job.train.early_stop_patience, _waited(begins_at)
    if not completed or not patience or waited < patience:
        return
    raise CheckFailedError(
        f"run {run.run_id} stopped early at step {begins_at.step}: no better after {counted(waited, 'validation')}, and "
        f"{_PATIENCE} is {patience}: no steps remain",
        where=_place(_PATIENCE, recorded, job),
        fix=f"`toolkit resume {run.run_id} --set {_PATIENCE}={waited + patience}` waits for {patience} more, 0 for ever; "
        "--from CKPT goes back",
    )


def _waited(manifest: Manifest) -> int:
    """Return the validations without an improvement, as `toolkit.train.early_stop` saved them; 0 without a count."""
    extra = manifest.state.get("extra")
    kept = extra.get("early_stop") if isinstance(extra, dict) else None
    waited = kept.get("waited") if isinstance(kept, dict) else None
    return waited if isinstance(waited, int) else 0


def _begins_at(run: RunDirectory, job: ResolvedJob, source: Path | None) -> Manifest | None:
    """Return the checkpoint that ranks would continue from; None if only they can determine it, or if they start at 0."""
    from toolkit.checkpoint.folder.choice import good_manifest

    chosen = source or next(iter(run.committed_checkpoints()[-1:]), None)
    if chosen is None or (source is not None and job.checkpoint.take == "weights"):
        return None
    try:
        return good_manifest(chosen)
    except (ToolkitError, OSError):  # a damaged one, for which ranks take an older one; or this host may not read it
        return None


def _obeys_the_key(run: RunDirectory, recorded: ResolvedJob, job: ResolvedJob) -> bool:
    """A script may count its steps by itself: the key counts where it was set, or where the records ended at it."""
    record = last_record(run.metrics / "train.jsonl")
    return _KEY in job.origins or (record is not None and record.steps == recorded.train.steps)

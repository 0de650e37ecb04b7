"""Has a run steps left to make? What `train.steps` and a checkpoint tell before any rank starts."""

from __future__ import annotations

import sys
from pathlib import Path

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import CheckFailedError, ToolkitError
from toolkit.metrics.training import last_record
from toolkit.rundir.layout import RunDirectory

_KEY = "train.steps"


def check_steps_left(
    run: RunDirectory, recorded: ResolvedJob, job: ResolvedJob, source: Path | None, *, completed: bool
) -> None:
    """Refuse a resume whose ranks would leave at once, since the run is at `train.steps` or beyond it.

    A run that failed behind its last step may have work left there: that is told, and not refused.

    Args:
        recorded, job: as the run was submitted last, and as it is resumed.
        source: the checkpoint that it is to go on from; None for its newest.
        completed: whether the run came to its end.

    Raises:
        CheckFailedError: nothing is left to do.
    """
    step = _begins_at(run, job, source)
    if step is None or step < job.train.steps or not _obeys_the_key(run, recorded, job):
        return
    if not completed and job.train.steps == recorded.train.steps:
        sys.stderr.write(f"toolkit: run {run.run_id} has made all {step} steps; what follows them alone is left\n")
        return
    more = step + job.train.steps
    raise CheckFailedError(
        f"run {run.run_id} is at step {step}, and train.steps is {job.train.steps}: nothing is left to do",
        where=job.origin(_KEY).place(_KEY),
        fix=f"`toolkit resume {run.run_id} --set train.steps={more}` makes {job.train.steps} more; --from CKPT goes back",
    )


def _begins_at(run: RunDirectory, job: ResolvedJob, source: Path | None) -> int | None:
    """The step that ranks would begin from; None where only they can tell, or where they begin at 0."""
    from toolkit.checkpoint.folder.choice import good_manifest

    chosen = source or next(iter(run.committed_checkpoints()[-1:]), None)
    if chosen is None or (source is not None and job.checkpoint.take == "weights"):
        return None
    try:
        return good_manifest(chosen).step
    except (ToolkitError, OSError):  # a damaged one, for which ranks take an older one; or this host may not read it
        return None


def _obeys_the_key(run: RunDirectory, recorded: ResolvedJob, job: ResolvedJob) -> bool:
    """A script may count its steps by itself: the key counts where it was set, or where the records ended at it."""
    record = last_record(run.metrics / "train.jsonl")
    return _KEY in job.origins or (record is not None and record.steps == recorded.train.steps)

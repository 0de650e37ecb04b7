"""A run that never began, since one whose success it was to follow did not have it: Slurm ended it in the queue."""

from __future__ import annotations

from toolkit.batch.chain import failed_parent
from toolkit.batch.explain.explain import Evidence, Explanation
from toolkit.batch.living import OWN_WORD
from toolkit.batch.run_status import RunStatus
from toolkit.rundir.layout import RunDirectory


def explain_broken_chain(run: RunDirectory, status: RunStatus) -> Explanation | None:
    """None where the run lives, or ended in a way of its own."""
    said_by = [part.source for part in status.tasks or (status,)]
    if not status.state.final or OWN_WORD in said_by or (broken := failed_parent(run)) is None:
        return None
    parent, ended = broken
    waited_for = f"after {parent.kind} {parent.run_id} (job {parent.job_id})"
    return Explanation(
        "parent_failed",
        f"run {parent.run_id}, whose success it was to follow, is {ended.state.value}: {ended.reason}",
        evidence=[Evidence("record.json", waited_for)],
        actions=[
            f"`toolkit explain {parent.run_id}` says why that one did not succeed",
            f"`toolkit resume {parent.run_id}`, then `toolkit resume {run.run_id} --after {parent.run_id}`",
            f"`toolkit resume {run.run_id}` begins without it",
        ],
    )

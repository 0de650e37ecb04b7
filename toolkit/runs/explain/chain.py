"""A run that never began, since one whose success it was to follow did not have it: Slurm ended it in the queue."""

from __future__ import annotations

from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.runs.explain.model import Evidence, Explanation
from toolkit.runs.record.parents import Parent, parents_of
from toolkit.runs.status.state import run_status
from toolkit.runs.status.state_table import RECORD_SOURCE, RunStatus


def explain_broken_chain(run: RunDirectory, status: RunStatus) -> Explanation | None:
    """None where the run lives, or ended in a way of its own."""
    said_by = [part.source for part in status.tasks or (status,)]
    if not status.state.final or RECORD_SOURCE in said_by or (broken := failed_parent(run)) is None:
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


def failed_parent(run: RunDirectory) -> tuple[Parent, RunStatus] | None:
    """The first run whose success a run was to follow and that ended otherwise; None where there is none."""
    for parent in parents_of(run.whole):
        if parent.kind == "ok" and parent.run.record.exists():
            status = run_status(parent.run)
            if status.state.final and status.state is not RunState.COMPLETED:
                return parent, status
    return None

"""The cause of an attempt's end as one sentence."""

from __future__ import annotations

from toolkit.rundir.attempt_records import AttemptRecord, reason_of
from toolkit.rundir.layout import AttemptDirectory
from toolkit.runs.requests.control import requeue_asked_at
from toolkit.supervise.symptoms import symptom_named

# Why an attempt ended that did not fail, in words.
_ENDS = {
    "completed": "every rank exited successfully",
    "walltime": "its walltime was over",
    "preempted": "other jobs took its nodes",
    "stopped": "it was asked to save and end",
    "cancelled": "it was cancelled",
    "stalled": "no rank made a step for too long",
    "node_lost": "a node failed",
    "supervisor_failed": "the supervisor could not go on",
}


def cause_in_words(attempt: AttemptDirectory, end: AttemptRecord) -> str:
    """What an attempt's record says happened, in one sentence."""
    if asked_at := requeue_asked_at(attempt, end):
        return f"you asked for it: `toolkit requeue` at {asked_at}"
    known = symptom_named(end.symptom)
    means = known.means if known is not None and not known.plain else _ENDS.get(end.cause, "")
    explanation = reason_of(attempt, end).removeprefix(f"ended on request ({end.cause})").removeprefix("; ")
    if not explanation:
        return means
    if f"rank {end.rank} " not in explanation:
        explanation = end.blaming(explanation)
    return explanation if not means or means in explanation else f"{means}: {explanation}"

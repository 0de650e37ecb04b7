"""Define the explanation of a run and its parts."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.rundir.attempt_records import OWN_REQUEUE, SCRIPT_DONE, AttemptRecord, reason_of
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.runs.requests.control import requeue_asked_at
from toolkit.runs.status.state_table import RunStatus
from toolkit.slurm.reasons import CanStart
from toolkit.supervise.symptoms import symptom_named
from toolkit.terminal.talk import clean


@dataclass(frozen=True)
class Evidence:
    """A quoted line and its source: a path below the run directory, or the command that printed it."""

    source: str
    line: str


@dataclass(frozen=True)
class Waiting:
    """A run in the queue. `estimated_start` is from `squeue --start`, `not_before` is certain; both UTC."""

    reason: str
    can_start: CanStart
    not_before: str | None = None
    estimated_start: str | None = None


@dataclass(frozen=True)
class Explanation:
    """A run at one moment, for `explain`. `symptom` is a stable name; docs/explain.md lists them.

    `why` is the cause in a sentence, `follows` what happens by itself, `actions` what the user can do, best first.
    """

    symptom: str
    why: str
    follows: str = ""
    actions: list[str] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    waiting: Waiting | None = None
    rank: int | None = None
    host: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    status: RunStatus | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the documented JSON of `explain --json`."""
        assert self.status is not None  # `explain_run` sets it
        value = asdict(self)
        del value["status"]
        return {
            "run_id": self.status.run_id,
            "state": self.status.state.value,
            **value,
            "status": self.status.as_json(),
        }


def quote_file(run: RunDirectory, path: Path, line: str) -> Evidence:
    """Quote a line of one of the run's files."""
    whole = run.whole.path
    return Evidence(str(path.relative_to(whole)) if path.is_relative_to(whole) else str(path), clean(line))


# Descriptions of ends without a failure.
_ENDS = {
    "completed": "every rank exited successfully",
    "walltime": "it reached its walltime",
    "preempted": "Slurm preempted it",
    "stopped": "it was asked to stop",
    "cancelled": "it was cancelled",
    "environment": "a rank could not import a module or parse its script",
    "stalled": "no rank completed a step for too long",
    "node_lost": "a node failed",
    "supervisor_failed": "the supervisor could not continue",
}


def cause_in_words(attempt: AttemptDirectory, end: AttemptRecord) -> str:
    """Describe the end of an attempt from its record, in one sentence."""
    if asked_at := requeue_asked_at(attempt, end):
        return f"requested with `toolkit requeue` at {asked_at}"
    if end.reason.startswith((SCRIPT_DONE, OWN_REQUEUE)):  # how each rank ended is unknown; Slurm did not preempt it
        return end.reason
    known = symptom_named(end.symptom)
    means = known.means if known is not None and not known.plain else _ENDS.get(end.cause, "")
    explanation = reason_of(attempt, end).removeprefix(f"ended on request ({end.cause})").removeprefix("; ")
    if not explanation or explanation.startswith(" "):  # " before any rank was started"
        return means + explanation
    if f"rank {end.rank} " not in explanation:
        explanation = end.blaming(explanation)
    return explanation if not means or means in explanation else f"{means}: {explanation}"

"""Build the rows of a timeline: one per attempt or array task, after the rows of the runs that the run follows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from toolkit.rundir.files import utc_of
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.runs.record.parents import parents_of
from toolkit.runs.status.state import run_status
from toolkit.runs.status.state_table import RunStatus
from toolkit.runs.timeline.life import Mark, Piece, Span, What, life_of

__all__ = ["timeline_of"]

MOST_PARENTS = 50


@dataclass(frozen=True)
class Row:
    """One line. `end` is the cause that ended an attempt, or the state of a task or another run."""

    name: str
    run_id: str
    attempt: int | None
    spans: list[Span]
    marks: list[Mark]
    end: str

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "run_id": self.run_id, "attempt": self.attempt, "end": self.end,
            "spans": [{"what": one.what, "began": utc_of(one.began), "ended": utc_of(one.ended)} for one in self.spans],
            "events": [{"what": one.what, "time": utc_of(one.time), "words": one.words} for one in self.marks],
        }  # fmt: skip


@dataclass(frozen=True)
class Timeline:
    status: RunStatus
    rows: list[Row]

    @property
    def began(self) -> float:
        return min(_moments(self.rows), default=0.0)

    @property
    def ended(self) -> float:
        return max(_moments(self.rows), default=0.0)

    @property
    def seconds(self) -> dict[What, float]:
        """Return the seconds of each activity of the run without its parents; for an array, of all tasks together."""
        spent = dict.fromkeys(What, 0.0)
        for row in self.rows:
            for span in row.spans if row.run_id.startswith(self.status.run_id) else ():
                spent[span.what] += span.seconds
        return spent

    def as_json(self) -> dict[str, Any]:
        """Return the documented JSON of `timeline --json`."""
        return {
            "run_id": self.status.run_id, "job_name": self.status.job_name, "state": self.status.state.value,
            "reason": self.status.reason, "began": utc_of(self.began), "ended": utc_of(self.ended),
            "seconds": {what.value: round(seconds, 3) for what, seconds in self.seconds.items()},
            "rows": [row.as_json() for row in self.rows],
        }  # fmt: skip


def timeline_of(run: RunDirectory) -> Timeline:
    """Return the timeline of a run, or of a task, until now. Slurm is queried only for its state."""
    status = run_status(run)
    before = [_of_parent(parent) for parent in _parents(run)]
    if status.tasks is None:
        own = [_of_attempt(run, piece, status.state) for piece in life_of(run, status.state)]
    else:
        own = [_together(f"task {one.task}", run.task(one.task), one.state) for one in status.tasks]
    return Timeline(status, [row for row in before + own if row.spans or row.marks])


def _of_attempt(run: RunDirectory, piece: Piece, state: RunState) -> Row:
    name = "in queue" if piece.number is None else f"attempt {piece.number}"
    end = piece.end or (state.value if piece.number is None or not state.final else "")
    return Row(name, run.run_id, piece.number, piece.spans, piece.marks, end)


def _together(name: str, run: RunDirectory, state: RunState) -> Row:
    pieces = life_of(run, state)
    spans = [span for piece in pieces for span in piece.spans]
    return Row(name, run.run_id, None, spans, [mark for piece in pieces for mark in piece.marks], state.value)


def _of_parent(run: RunDirectory) -> Row:
    status = run_status(run)
    if status.tasks is None:
        return _together(f"after {run.job_name}", run, status.state)
    rows = [_together("", run.task(one.task), one.state) for one in status.tasks]
    spans = [span for row in rows for span in row.spans]
    return Row(f"after {run.job_name}", run.run_id, None, spans, [], status.state.value)


def _parents(run: RunDirectory) -> list[RunDirectory]:
    """Return all direct and indirect parents of a run that still exist, the oldest first."""
    found: dict[str, RunDirectory] = {}
    look = [run.whole]
    while look and len(found) < MOST_PARENTS:
        for parent in parents_of(look.pop()):
            if parent.run_id not in found and parent.run.record.exists():
                found[parent.run_id] = parent.run
                look.append(parent.run)
    return [found[run_id] for run_id in sorted(found)]


def _moments(rows: Iterable[Row]) -> Iterator[float]:
    for row in rows:
        for span in row.spans:
            yield from (span.began, span.ended)
        yield from (mark.time for mark in row.marks)

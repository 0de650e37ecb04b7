"""What an explanation of a run consists of."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.rundir.layout import RunDirectory
from toolkit.runs.status.state_table import RunStatus
from toolkit.slurm.reasons import CanStart
from toolkit.terminal.talk import clean


@dataclass(frozen=True)
class Evidence:
    """A quoted line and where it stands: a path below the run directory, or the command that printed it."""

    source: str
    line: str


@dataclass(frozen=True)
class Waiting:
    """Of a run in the queue. `estimated_start` is what `squeue --start` says, `not_before` what is certain; both UTC."""

    reason: str
    can_start: CanStart
    not_before: str | None = None
    estimated_start: str | None = None


@dataclass(frozen=True)
class Explanation:
    """A run at one moment, as `explain` tells it. `symptom` is one stable word; docs/explain.md lists them.

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
        """The documented JSON of `explain --json`."""
        assert self.status is not None  # `explain_run` lays it in
        value = asdict(self)
        del value["status"]
        return {
            "run_id": self.status.run_id,
            "state": self.status.state.value,
            **value,
            "status": self.status.as_json(),
        }


def quote_file(run: RunDirectory, path: Path, line: str) -> Evidence:
    """A line of one of the run's files."""
    whole = run.whole.path
    return Evidence(str(path.relative_to(whole)) if path.is_relative_to(whole) else str(path), clean(line))

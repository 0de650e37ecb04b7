"""What a waiting person should hear of a run's attempts: which one ended, and that another follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import NEXT_START_BEGAN, Next
from toolkit.runs.status.rehearsal_notes import reason_of

FOLLOWS = {
    Next.RESTART: "restarting",
    Next.REQUEUE: "the job is being requeued",
    Next.AWAIT: "Slurm requeues the job",
    Next.FOLLOW_UP: "a follow-up job continues it",
}


@dataclass
class RestartNews:
    """Tells each attempt that did not end the run, once; those that had ended before are no news."""

    run: RunDirectory
    _told: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._told = {number for number, _ in self._ended()}

    def new(self) -> Iterator[str]:
        """A line for each attempt that ended since the last look and that another one follows."""
        for number, line in self._ended():
            if number not in self._told:
                self._told.add(number)
                if line:
                    yield line

    def _ended(self) -> Iterator[tuple[int, str]]:
        for number in self.run.attempt_numbers():
            attempt = self.run.attempt(number)
            end = read_json_or_none(attempt.exit_file)
            if end is None:
                continue
            place = f"rank {end['rank']} on {end['host']}: " if end.get("rank") is not None else ""
            text = f"attempt {number} {end['cause']} ({place}{reason_of(attempt, end)}); {follows(end)}"
            yield number, "" if end["final"] else text


def follows(end: Mapping[str, Any]) -> str:
    """What comes after an attempt with such an end, in words."""
    if end["final"]:
        return "nothing follows"
    if end["decision"] == NEXT_START_BEGAN:  # by a resume, a requeue or a follow-up job: it is there
        return "another start goes on"
    return FOLLOWS[Next(end["next"])]

"""Tell a user waiting for a run which attempt has ended, and what happens next."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from toolkit.rundir.attempt_records import AttemptRecord, reason_of
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import NEXT_START_BEGAN, Next

__all__ = ["RestartNews"]

FOLLOWS = {
    Next.RESTART: "restarting",
    Next.REQUEUE: "the job is being requeued",
    Next.AWAIT: "Slurm requeues the job",
    Next.FOLLOW_UP: "a follow-up job continues it",
}


@dataclass
class RestartNews:
    """Reports once each attempt that ends without ending the run, and each damaged checkpoint, from its creation on."""

    run: RunDirectory
    _told: set[int] = field(default_factory=set)
    _skipped: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._told = {number for number, _ in self._ended()}
        self._skipped = self._damaged()

    def new(self) -> Iterator[str]:
        """Return a line for each attempt that ended since the last call and that another one follows.

        Also for each checkpoint that an attempt renamed because it was damaged.
        """
        for name in sorted(self._damaged() - self._skipped):
            self._skipped.add(name)
            yield f"checkpoint {name.partition('.')[0]} is damaged; the run continues from an earlier one, and keeps it as {name}"
        for number, line in self._ended():
            if number not in self._told:
                self._told.add(number)
                if line:
                    yield line

    def _damaged(self) -> set[str]:
        return {path.name for path in self.run.checkpoints.glob("step-*.bad-*")}

    def _ended(self) -> Iterator[tuple[int, str]]:
        for number in self.run.attempt_numbers():
            attempt = self.run.attempt(number)
            end = AttemptRecord.read(attempt)
            if end is None:
                continue
            line = f"attempt {number} {end.cause} ({end.blaming(reason_of(attempt, end))}); {follows(end)}"
            yield number, "" if end.final else line


def follows(end: AttemptRecord) -> str:
    """Describe what follows an attempt with such an end."""
    if end.final:
        return "nothing follows"
    if end.decision == NEXT_START_BEGAN:  # a resume, a requeue or a follow-up job has begun a start
        return "another start continues"
    return FOLLOWS[end.next]

"""Records of saves, which rank 0 writes into `metrics/checkpoints.jsonl` from the training thread."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.checkpoint.format.layout import step_folder
from toolkit.metrics.checkpoints import SaveLog, SaveRecord
from toolkit.rundir.files import utc_now
from toolkit.terminal.talk import say_beside
from toolkit.world.facts import World


@dataclass(frozen=True)
class _End:
    seconds: float
    time: str
    bytes: int | None
    error: str | None


@dataclass
class NotedSave:
    """One save; `waited_s` is the time for which training waited."""

    step: int
    why: str
    metric: float | None
    folder: Path | None
    began_at: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0
    _end: _End | None = None

    def waited(self) -> None:
        """Record the waiting time; called when training continues."""
        self.waited_s = time.monotonic() - self.began_at

    def ended(self, error: Exception | None) -> None:
        """Record the commit or the failure. Called from the thread that saves."""
        seconds, now = time.monotonic() - self.began_at, utc_now()
        size = _size_of(self.folder) if self.folder is not None and error is None else None
        self._end = _End(seconds, now, size, None if error is None else str(error))

    def record(self, attempt: int) -> SaveRecord | None:
        """Return the record of the save, or None while it is in progress."""
        end = self._end
        if end is None:
            return None
        return SaveRecord(
            step=self.step,
            why=self.why,
            waited_s=round(min(self.waited_s, end.seconds), 4),
            committed_s=round(end.seconds, 4) if end.error is None else None,
            bytes=end.bytes,
            error=end.error,
            metric=self.metric,
            time=end.time,
            attempt=attempt,
        )


class SaveNotes:
    """Writes the records of a run to the file, on rank 0 only, and tracks the save in progress."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._log: SaveLog | None = None
        if world.rank == 0 and world.run_dir is not None:
            self._log = SaveLog(world.run_dir / "metrics" / "checkpoints.jsonl")
        self._open: NotedSave | None = None

    def begin(self, step: int, why: str, metric: float | None, began_at: float) -> NotedSave:
        """Start tracking a new save; the previous one must have ended."""
        self.write_ended()
        folder = None
        if self._log is not None and self._world.run_dir is not None:
            folder = step_folder(self._world.run_dir / "checkpoints", step)
        self._open = NotedSave(step, why, metric, folder, began_at)
        return self._open

    def write_ended(self) -> None:
        """Write the record of the save in progress if it has ended."""
        record = self._open.record(self._world.attempt) if self._open is not None else None
        if record is not None:
            self._open = None
            if self._log is not None:
                self._log.write(record)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def _size_of(folder: Path) -> int | None:
    """Return the size of a new checkpoint in bytes; None on an I/O error, which must not end a run."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError as error:
        say_beside(f"cannot determine the size of {folder}: {error}")
        return None

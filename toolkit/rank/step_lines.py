"""Read the steps that rank 0 of a script prints, as lines `toolkit: step N` or `toolkit: step N / M`, from its log."""

import os
import re
import threading
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json_or_none, utc_now, write_json
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.rank_logs import is_shared, label_of
from toolkit.terminal.talk import say_beside

PERIOD_S = 1.0
CHUNK_BYTES = 1 << 20


class StepLines:
    """A thread that writes the last printed step to the heartbeat file, once a second."""

    def __init__(self, attempt: AttemptDirectory, log: Path) -> None:
        label = label_of(0) if is_shared(log) else ""
        # A progress bar may precede the words on the same line.
        self._pattern = re.compile(
            rb"^" + re.escape(label.encode()) + rb"[^\n]*toolkit: step (\d{1,15})(?: ?/ ?\d+)?\s*$", re.MULTILINE
        )
        self._attempt, self._log = attempt, log
        self._offset = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        """Start the thread; after the fork of the rank, which would not copy it."""
        self._thread.start()

    def finish(self) -> None:
        """Read the last lines of the exited rank, and end the thread."""
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(PERIOD_S):
            self._record_new()
        self._record_new(is_over=True)

    def _record_new(self, *, is_over: bool = False) -> None:
        try:
            step = self._read_new(is_over=is_over)
            beat = read_json_or_none(self._attempt.heartbeat)
            if step is not None and (beat is None or not beat.get("saves", True)):  # not that of world.should_stop
                beat = {"step": step, "time": utc_now(), "saves": False}
                write_json(self._attempt.heartbeat, beat, durable=False)
        except (OSError, ToolkitError) as error:  # a file server that does not respond must not end the guard
            say_beside(f"cannot record the step of rank 0: {error}")

    def _read_new(self, *, is_over: bool) -> int | None:
        """Return the last step in the lines written since the previous call; None if they contain none.

        The last line counts without a newline only if the rank `is_over`.
        """
        step = None
        with self._log.open("rb") as log:
            while chunk := os.pread(log.fileno(), CHUNK_BYTES, self._offset):
                is_whole = is_over or len(chunk) == CHUNK_BYTES
                whole = chunk.rpartition(b"\n")[0] or (chunk if is_whole else b"")
                if not whole:
                    break
                found = self._pattern.findall(whole)
                step = int(found[-1]) if found else step
                self._offset += len(whole)
        return step

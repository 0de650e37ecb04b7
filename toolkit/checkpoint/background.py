"""One piece of work at a time in a thread, whose failure waits until somebody asks."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """A thread that does one thing after the other; the next begins when the last was waited for."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """The work is over and failed, and nobody was told."""
        return not self.is_busy and self._failure is not None

    def start(self, work: Callable[[], None]) -> None:
        assert self._thread is None, "wait() comes first"

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised again by wait()
                self._failure = error

        # No daemon: a process that ends waits for its last save.
        self._thread = threading.Thread(target=run, name="checkpoint save")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the work.

        Raises:
            Exception: what it raised, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

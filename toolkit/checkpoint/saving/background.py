"""One piece of work at a time in a thread, whose failure waits until somebody asks."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its own end must be registered before ours
import sys
import threading
from collections.abc import Callable
from weakref import WeakSet

_ALL: WeakSet[Background] = WeakSet()

# Hears, in the thread, that the work is over, and how it failed.
OnEnd = Callable[[Exception | None], None]


class Background:
    """A thread that does one thing after the other; the next begins when the last was waited for."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        _ALL.add(self)

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """The work is over and failed, and nobody was told."""
        return not self.is_busy and self._failure is not None

    def start(self, work: Callable[[], None], on_end: OnEnd | None = None) -> None:
        assert self._thread is None, "wait() comes first"

        def run() -> None:
            failure = None
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised again by wait()
                failure = error
            self._failure = failure
            if on_end is not None:
                on_end(failure)

        # No daemon: a process that ends waits for its last save.
        thread = threading.Thread(target=run, name="checkpoint save")
        thread.start()
        self._thread = thread

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


def wait_for_all() -> None:
    """Wait for all that this process has in the background.

    Raises:
        Exception: what one of them raised and nobody was told.
    """
    for background in list(_ALL):
        background.wait()


def _tell_what_nobody_heard() -> None:
    """The last chance of a process that ends: wait, and say what failed."""
    for background in list(_ALL):
        try:
            background.wait()
        except Exception as error:  # noqa: BLE001 - the process ends, and nobody is left to catch it
            sys.stderr.write(f"toolkit: {error}\n")


# An interpreter that ends stops all thread pools, joins the threads that use them, and then runs what `atexit` knows.
# This runs first of all, as the last that was registered, and a save finds everything as it was.
threading._register_atexit(_tell_what_nobody_heard)  # type: ignore[attr-defined]

"""One piece of work at a time in a thread, whose failure waits until somebody asks."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its own end must be registered before ours
import threading
from collections.abc import Callable
from queue import SimpleQueue
from weakref import WeakSet

from toolkit.errors import OwnFailureError
from toolkit.talk import say

_ALL: WeakSet[Background] = WeakSet()

# Hears, in the thread, that the work is over, and how it failed.
OnEnd = Callable[[Exception | None], None]
Agree = Callable[[Callable[[], None]], object]


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

    def start(self, work: Callable[[], None], on_end: OnEnd | None = None, *, agree: Agree) -> None:
        """Begin, where all that work together can.

        Args:
            agree: runs what it is given here and in the other processes, and raises where it failed in any.

        Raises:
            Exception: what `agree` raised; the work does not begin.
        """
        assert self._thread is None, "wait() comes first"
        may_begin: SimpleQueue[bool] = SimpleQueue()

        def run() -> None:
            if not may_begin.get():  # others could not, and would not answer
                return
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
        agreed = False
        try:
            agree(lambda: _start(thread))
            self._thread, agreed = thread, True
        finally:
            may_begin.put(agreed)

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


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise OwnFailureError(
            f"no thread could be started for it: {error}",
            fix="raise the host's limit of threads (`ulimit -u`, or pids.max of the cgroup), or save with `save`, as "
            "checkpoint.background = false does",
        ) from error


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
            say(str(error))


# An interpreter that ends stops all thread pools, joins the threads that use them, and then runs what `atexit` knows.
# This runs first of all, as the last that was registered, and a save finds everything as it was.
threading._register_atexit(_tell_what_nobody_heard)  # type: ignore[attr-defined]

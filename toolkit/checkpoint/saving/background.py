"""Runs one save at a time in a thread, and stores its error until the caller waits for the save."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - must register its exit function before this module does
import threading
from collections.abc import Callable
from queue import SimpleQueue
from weakref import WeakSet

from toolkit.errors import OwnFailureError
from toolkit.terminal.talk import say

__all__ = ["OnEnd"]

_ALL: WeakSet[Background] = WeakSet()

# Called in the background thread, with None or the error of the save.
OnEnd = Callable[[Exception | None], None]
Agree = Callable[[Callable[[], None]], object]


class Background:
    """Runs a save in a thread; after `wait` it can start the next save."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        _ALL.add(self)

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the work failed and no caller has received the error."""
        return not self.is_busy and self._failure is not None

    def start(self, work: Callable[[], None], on_end: OnEnd | None = None, *, agree: Agree) -> None:
        """Start `work` in a thread if all ranks can start theirs; otherwise raise the error of `agree`.

        `agree` is a collective: it calls a function on every rank, and raises an error on all if it failed on any.
        """
        assert self._thread is None, "call wait() first"
        may_start: SimpleQueue[bool] = SimpleQueue()

        def run() -> None:
            if not may_start.get():  # another rank could not start its thread, so collectives with it would hang
                return
            failure = None
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised again by wait()
                failure = error
            self._failure = failure
            if on_end is not None:
                on_end(failure)

        # Not a daemon thread, so that an exiting process waits for its last save.
        thread = threading.Thread(target=run, name="checkpoint save")
        agreed = False
        try:
            agree(lambda: _start(thread))
            self._thread, agreed = thread, True
        finally:
            may_start.put(agreed)

    def wait(self) -> None:
        """Wait for the save. Raises its error, but only once."""
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
            f"cannot start a thread for the save: {error}",
            fix="raise the thread limit of the host (`ulimit -u`, or pids.max of the cgroup), or call `save` instead "
            "(checkpoint.background = false)",
        ) from error


def wait_for_all() -> None:
    """Wait for all background saves of this process; raises the first error that no caller has received."""
    for background in list(_ALL):
        background.wait()


def _report_at_exit() -> None:
    """Wait for all saves when the process exits, and log the errors that no caller has received."""
    for background in list(_ALL):
        try:
            background.wait()
        except Exception as error:  # noqa: BLE001 - the process exits, and no caller can catch it
            say(str(error))


# At exit the interpreter first stops all thread pools, which a running save needs, and only then calls the `atexit`
# functions. threading._register_atexit functions run in reverse order, so this one runs before the pools stop.
threading._register_atexit(_report_at_exit)  # type: ignore[attr-defined]

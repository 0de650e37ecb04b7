"""Runs one save at a time in a thread, and keeps its error until the caller waits for it."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its own end must be registered before ours
import threading
from collections.abc import Callable
from queue import SimpleQueue
from weakref import WeakSet

from toolkit.errors import OwnFailureError
from toolkit.terminal.talk import say

__all__ = ["OnEnd"]

_ALL: WeakSet[Background] = WeakSet()

# Called in the thread with the error of the work, or None.
OnEnd = Callable[[Exception | None], None]
Agree = Callable[[Callable[[], None]], object]


class Background:
    """A thread for one save; after `wait` it can start the next one."""

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
        """Start the work if all processes can; raises the error of `agree` if one cannot.

        `agree` calls a function here and in the other processes, and raises an error if it failed in any.
        """
        assert self._thread is None, "wait() comes first"
        may_start: SimpleQueue[bool] = SimpleQueue()

        def run() -> None:
            if not may_start.get():  # another process could not, and would not respond
                return
            failure = None
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised again by wait()
                failure = error
            self._failure = failure
            if on_end is not None:
                on_end(failure)

        # Not a daemon: an exiting process waits for its last save.
        thread = threading.Thread(target=run, name="checkpoint save")
        agreed = False
        try:
            agree(lambda: _start(thread))
            self._thread, agreed = thread, True
        finally:
            may_start.put(agreed)

    def wait(self) -> None:
        """Wait for the work, and raise its error, once."""
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
            fix="raise the host's limit of threads (`ulimit -u`, or pids.max of the cgroup), or save with `save`, as "
            "checkpoint.background = false does",
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


# At exit the interpreter stops all thread pools, joins the threads that use them, and then runs the functions of
# `atexit`. This function was registered last, so it runs first, while a save can still use everything.
threading._register_atexit(_report_at_exit)  # type: ignore[attr-defined]

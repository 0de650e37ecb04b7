"""A thread that runs its tasks sequentially."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from toolkit.comm.sent_bytes import counted_here


class OrderedThread:
    """Runs work in the order of `submit`, until it is closed or the process exits.

    It is a daemon thread, unlike those of concurrent.futures, because a rank that fails must be able to exit while this
    thread still waits for other ranks in a collective.
    """

    def __init__(self, name: str) -> None:
        self._is_closed = False
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue `work`; the future gets its result or its exception. Raises RuntimeError after `close`."""
        if self._is_closed:  # the future would wait forever
            raise RuntimeError("expected an open thread, got one that is closed")
        future: Future[Any] = Future()
        self._waiting.put((future, counted_here(work)))
        return future

    def close(self) -> None:
        """Stop the thread after the submitted work."""
        self._is_closed = True
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            future, work = item
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the reader of the future raises it again
                future.set_exception(error)
            del item, future, work  # while the thread waits, it keeps no tensors alive

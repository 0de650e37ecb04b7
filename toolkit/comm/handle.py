"""A collective that was started: wait for it, or ask whether it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from toolkit.comm.failures import CollectiveError

T = TypeVar("T")
_POLL_S = 0.001


class Handle(Generic[T]):
    """The result of an asynchronous call. The caller must not touch the passed tensors until it is done."""

    def __init__(
        self,
        future: Future[T],
        late: Callable[[float], CollectiveError],
        patience_s: float,
        event: torch.cuda.Event | None = None,
    ) -> None:
        """Keep `future`, and on a GPU the event after its work; `late` makes the error of a timeout in seconds."""
        self._future = future
        self._late = late
        self._patience_s = patience_s
        self._event = event

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done() and (self._event is None or self._event.query())

    def when_done(self, call: Callable[[], object]) -> None:
        """Have `call` called, in another thread, when this is done or has failed."""
        self._future.add_done_callback(lambda _: call())

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the result when it is there. It may be asked for again, also after a time-out.

        Without `timeout_s` it waits as long as the communicator does; on a GPU it then lets the current stream wait
        instead of the caller.

        Raises:
            CollectiveError: the time is over, or the collective failed; it names the ranks that did not come.
            ToolkitError: what the collective found in the tensors.
        """
        patience_s = self._patience_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + patience_s
        try:
            result = self._future.result(patience_s)
        except TimeoutError:
            if not self._future.done():
                raise self._late(patience_s) from None
            result = self._future.result()
        if self._event is None:
            return result
        while timeout_s is not None and not self._event.query():
            if time.monotonic() > deadline:
                raise self._late(patience_s)
            time.sleep(_POLL_S)
        stream = torch.cuda.current_stream()
        stream.wait_event(self._event)
        for tensor in result if isinstance(result, list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                tensor.record_stream(stream)  # it was made on the communicator's stream, and is used on this one
        return result

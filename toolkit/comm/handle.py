"""The handle of a started collective: wait for it, or test whether it is done."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from toolkit.comm.failures import CollectiveError

T = TypeVar("T")
_POLL_S = 0.001


class Handle(Generic[T]):
    """The result of an asynchronous call. The caller must not use the passed tensors until the call is done."""

    def __init__(
        self,
        future: Future[T],
        late: Callable[[float], CollectiveError],
        patience_s: float,
        event: torch.cuda.Event | None = None,
    ) -> None:
        """Wrap `future`, and on a GPU the event recorded after its work; `late(seconds)` returns the error of a timeout."""
        self._future = future
        self._late = late
        self._patience_s = patience_s
        self._event = event

    def done(self) -> bool:
        """Return whether `wait` would return or raise immediately."""
        return self._future.done() and (self._event is None or self._event.query())

    def when_done(self, call: Callable[[], object]) -> None:
        """Run `call` in another thread when the collective is done or has failed."""
        self._future.add_done_callback(lambda _: call())

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for the result and return it. The caller may call this again, even after a timeout.

        Without `timeout_s` the communicator's timeout applies; on a GPU the current stream then waits instead of the
        caller.

        Raises:
            CollectiveError: the timeout expired, or the collective failed; the error names the missing ranks.
            ToolkitError: the tensors are invalid for the collective.
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
                tensor.record_stream(stream)  # allocated on the communicator's stream, but used on this one
        return result

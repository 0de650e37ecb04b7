"""Issue collectives sequentially, number and count them, and add the missing ranks to errors."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from toolkit.comm.counters import Counters
from toolkit.comm.failures import CollectiveError, Ticket, Witness, is_transport_error
from toolkit.comm.handle import Handle
from toolkit.comm.ordered_thread import OrderedThread
from toolkit.comm.presence import Presence

T = TypeVar("T")


class Issuer:
    """This rank's queue of collectives.

    On the CPU, a thread runs them in call order. Sends and receives between two ranks have one thread per direction, so
    that both ranks may send before they receive. On a GPU, the calling thread issues everything on one stream.
    """

    def __init__(
        self, ranks: Sequence[int], where: str, presence: Presence | None, counters: Counters, timeout_s: float
    ) -> None:
        """Issue collectives of the world ranks `ranks`; `where` names this rank. `presence` is None for one rank."""
        self.counters = counters
        self.timeout_s = timeout_s
        self._witness = Witness(ranks, where, presence)
        self._presence = presence
        self._lanes: dict[str, OrderedThread] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._sequence = 0
        self._lock = threading.Lock()
        self._broken: CollectiveError | None = None

    def start(self, kind: str, tensors: Sequence[torch.Tensor], work: Callable[[], T]) -> Handle[T]:
        """Queue a collective that reads or fills `tensors`. All ranks make the same calls in the same order."""
        with self._lock:
            self._refuse_if_broken(kind)
            self._sequence += 1
            ticket = Ticket(kind, self._sequence)
            return self._queue("collectives", ticket, tensors, work)

    def start_between_two(
        self, kind: str, peer: int, tensors: Sequence[torch.Tensor], work: Callable[[], T]
    ) -> Handle[T]:
        """Queue a call between this rank and the one at `peer` in the group; each kind has its own queue."""
        with self._lock:
            self._refuse_if_broken(kind)
            return self._queue(kind, Ticket(kind, self._sequence, peer), tensors, work)

    def close(self) -> None:
        """Stop the threads and the heartbeat after the queued work."""
        for lane in self._lanes.values():
            lane.close()
        if self._presence is not None:
            self._presence.close()

    def explained(self, ticket: Ticket, seconds: float, error: BaseException | None = None) -> CollectiveError:
        return self._witness.explained(ticket, seconds, error)

    def _refuse_if_broken(self, kind: str) -> None:
        if self._broken is not None:
            raise self._witness.refused(kind, self._sequence, self._broken) from self._broken

    def _queue(self, lane: str, ticket: Ticket, tensors: Sequence[torch.Tensor], work: Callable[[], T]) -> Handle[T]:
        def late(seconds: float) -> CollectiveError:
            error = self.explained(ticket, seconds)
            if seconds >= self.timeout_s:  # the transport has timed out as well
                self._broken = self._broken or error
            return error

        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        if devices:
            future, event = self._on_stream(devices.pop(), ticket, tensors, work)
            return Handle(future, late, self.timeout_s, event)
        if lane not in self._lanes:
            self._lanes[lane] = OrderedThread(lane)
        return Handle(self._lanes[lane].submit(lambda: self._do(ticket, tensors, work)), late, self.timeout_s)

    def _do(self, ticket: Ticket, tensors: Sequence[torch.Tensor], work: Callable[[], T]) -> T:
        self._refuse_if_broken(ticket.kind)
        if ticket.peer is None and self._presence is not None:
            self._presence.enter(ticket.sequence, ticket.kind)
        start = time.monotonic()
        try:
            result = work()
        except Exception as error:
            if not is_transport_error(error):
                raise
            explained = self.explained(ticket, time.monotonic() - start, error)
            self._broken = self._broken or explained
            raise explained from error
        timed = all(tensor.device.type == "cpu" for tensor in tensors)
        payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.counters.add(ticket.kind, payload, time.monotonic() - start if timed else None)
        return result

    def _on_stream(
        self, device: torch.device, ticket: Ticket, tensors: Sequence[torch.Tensor], work: Callable[[], T]
    ) -> tuple[Future[T], torch.cuda.Event]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        future: Future[T] = Future()
        with torch.cuda.stream(stream):
            future.set_result(self._do(ticket, tensors, work))
            event = stream.record_event()
        for tensor in tensors:
            tensor.record_stream(stream)  # otherwise torch may reuse its memory while the stream still reads it
        return future, event

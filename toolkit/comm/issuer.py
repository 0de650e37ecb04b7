"""Issues collectives one after the other, numbers and counts them, and explains those that do not finish."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from toolkit.comm.counters import Counters
from toolkit.comm.failures import CollectiveError, is_transport_error
from toolkit.comm.handle import Handle
from toolkit.comm.ordered_thread import OrderedThread
from toolkit.comm.presence import Presence, Sighting

T = TypeVar("T")


@dataclass(frozen=True)
class Ticket:
    """One call: its kind, its number among the collectives, and the peer when only two ranks take part."""

    kind: str
    sequence: int
    peer: int | None = None

    def __str__(self) -> str:
        return self.kind if self.peer is not None else f"{self.kind} number {self.sequence}"


class Issuer:
    """This rank's queue of collectives.

    On the CPU a thread takes them in the order of the calls; what is sent to one rank and received from one has a
    thread for each direction, so that two ranks may both send before they receive. On a GPU all goes on one
    stream, from the calling thread.
    """

    def __init__(
        self, ranks: Sequence[int], where: str, presence: Presence | None, counters: Counters, timeout_s: float
    ) -> None:
        """Issue for a group of `ranks`, numbers in the world; `where` names this rank. No presence: it is alone."""
        self.counters = counters
        self.timeout_s = timeout_s
        self._ranks = ranks
        self._where = where
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
        """Queue what only this rank and the one at `peer` in the group take part in; each kind has its own queue."""
        with self._lock:
            self._refuse_if_broken(kind)
            return self._queue(kind, Ticket(kind, self._sequence, peer), tensors, work)

    def close(self) -> None:
        """Let the threads end when their work is done."""
        for lane in self._lanes.values():
            lane.close()
        if self._presence is not None:
            self._presence.close()

    def explained(self, ticket: Ticket, seconds: float, error: BaseException | None = None) -> CollectiveError:
        """The error of a call that did not finish in `seconds`, or that failed after them, with who is missing."""
        outcome = f"did not finish in {seconds:.1f} s" if error is None else f"failed after {seconds:.1f} s"
        try:
            sightings = self._presence.look() if self._presence is not None else []
        except RuntimeError:
            return self._error(
                f"{ticket} {outcome}, and the store does not answer: rank 0, or the agent that holds it, has ended "
                "or is cut off",
                ticket,
                (),
                (),
                "see the log of rank 0",
            )
        if ticket.peer is not None:
            others = [place for place in range(len(self._ranks)) if place != ticket.peer]
            missing = [ticket.peer]
        else:
            missing = [place for place, seen in enumerate(sightings) if not seen.came_to(ticket.sequence)]
            others = [place for place in range(len(self._ranks)) if place not in missing]
        return self._named(ticket, outcome, sightings, missing, others, error)

    def _named(
        self,
        ticket: Ticket,
        outcome: str,
        sightings: Sequence[Sighting],
        missing: Sequence[int],
        present: Sequence[int],
        error: BaseException | None,
    ) -> CollectiveError:
        parts = [f"{ticket} {outcome}"]
        parts += [f"rank {self._ranks[place]} did not come ({_told(sightings[place])})" for place in missing[:8]]
        if len(missing) > 8:
            parts.append(f"nor did {len(missing) - 8} more")
        parts += [
            f"rank {self._ranks[place]} is in {line.collective} instead"
            for place in present
            if (line := sightings[place].line) and line.sequence == ticket.sequence and line.collective != ticket.kind
        ][: 8 if ticket.peer is None else 0]
        if ticket.peer is None:
            parts.append(f"there: {_listed([self._ranks[place] for place in present])}")
        if error is not None and not missing:
            parts.append(f"the network said: {str(error).splitlines()[0]}")
        fix = "see the log of rank {}: what it does instead, or why it ended; if it is only slow, a larger timeout_s"
        return self._error(
            "; ".join(parts),
            ticket,
            [self._ranks[place] for place in present],
            [self._ranks[place] for place in missing],
            fix.format(self._ranks[missing[0]]) if missing else "all ranks came: look at the network between them",
        )

    def _error(
        self, message: str, ticket: Ticket, present: Sequence[int], missing: Sequence[int], fix: str
    ) -> CollectiveError:
        return CollectiveError(
            message,
            where=self._where,
            fix=fix,
            collective=ticket.kind,
            sequence=ticket.sequence,
            present=present,
            missing=missing,
        )

    def _refuse_if_broken(self, kind: str) -> None:
        if self._broken is None:
            return
        before = self._broken
        raise CollectiveError(
            f"{kind} cannot be issued: {before.collective} number {before.sequence} failed before it",
            where=self._where,
            fix="make a new communicator, or end this rank",
            collective=kind,
            sequence=self._sequence,
            present=before.present,
            missing=before.missing,
        ) from before

    def _queue(self, lane: str, ticket: Ticket, tensors: Sequence[torch.Tensor], work: Callable[[], T]) -> Handle[T]:
        def late(seconds: float) -> CollectiveError:
            error = self.explained(ticket, seconds)
            if seconds >= self.timeout_s:  # the transport gives up now, too
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
            tensor.record_stream(stream)  # else its memory may be given away while the stream still reads it
        return future, event


def _told(sighting: Sighting) -> str:
    if sighting.line is None:
        return "it never made this communicator"
    life = "alive" if sighting.lives else "it has left" if sighting.line.left else "no sign of life"
    return f"{life}, last in {sighting.line.collective} number {sighting.line.sequence}"


def _listed(ranks: Sequence[int]) -> str:
    if not ranks:
        return "nobody"
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")

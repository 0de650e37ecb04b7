"""Bytes and seconds of the collectives that we issue. One instance counts for whoever made it."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Count:
    """Totals of one kind of collective.

    `payload_bytes` is the size of the tensor that this rank puts in, not what crosses the wire. `seconds` is the
    time that this rank spent in `timed_calls`; calls on a GPU only enqueue work and are not timed.
    """

    calls: int = 0
    timed_calls: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0


class Counters:
    """Totals by kind. The thread that reduces writes, any thread may read."""

    def __init__(self) -> None:
        self._counts: dict[str, Count] = {}
        self._lock = threading.Lock()

    def add(self, kind: str, payload_bytes: int, seconds: float | None) -> None:
        """Count one call; `seconds` is None when the call was not timed."""
        with self._lock:
            old = self._counts.get(kind, Count())
            self._counts[kind] = Count(
                old.calls + 1,
                old.timed_calls + (seconds is not None),
                old.payload_bytes + payload_bytes,
                old.seconds + (seconds or 0.0),
            )

    def totals(self) -> dict[str, Count]:
        """The totals so far."""
        with self._lock:
            return dict(self._counts)

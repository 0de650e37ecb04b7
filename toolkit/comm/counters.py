"""Count the calls, bytes and seconds of the collectives that toolkit issues."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Count:
    """Totals of one kind of collective.

    `payload_bytes` is the size of this rank's input tensor, not the traffic on the network. `seconds` is the
    time that this rank spent in `timed_calls`; calls on a GPU only enqueue work and are not timed.
    """

    calls: int = 0
    timed_calls: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0


class Counters:
    """Totals by kind of collective. Thread-safe."""

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

    @contextmanager
    def timed(self, kind: str, tensor: torch.Tensor) -> Iterator[None]:
        """Count one call with input `tensor`, and time the block unless the tensor is on a GPU."""
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start if tensor.device.type == "cpu" else None
        self.add(kind, tensor.numel() * tensor.element_size(), seconds)

    def totals(self) -> dict[str, Count]:
        with self._lock:
            return dict(self._counts)

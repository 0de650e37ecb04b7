"""Times of work on a GPU: the host only enqueues it, so events in the stream mark the phases."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


class DeviceClock:
    """Marks are events of the current stream; a phase takes as long as the stream is between two of them.

    So a wait for another stream, such as NCCL's, counts where it holds up the work, and what the host does counts only
    when the stream runs dry for it.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._anchor()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def nanoseconds(self, marks: Sequence[torch.cuda.Event]) -> list[int]:
        """Waits for the device, once."""
        torch.cuda.synchronize(self._device)
        times = [self._anchor_ns + int(self._anchor_event.elapsed_time(mark) * 1e6) for mark in marks]
        self._anchor()  # distances are 32-bit floats: they lose their microseconds after a minute
        return times

    def _anchor(self) -> None:
        self._anchor_event = self.mark()
        self._anchor_event.synchronize()
        self._anchor_ns = time.perf_counter_ns()

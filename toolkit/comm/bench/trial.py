"""Call, time and check one collective, with known inputs and expected results.

The input of a rank is integers that depend on rank and position, small enough for exact float sums. As in nccl-tests,
successive calls use successive parts of a large buffer, because data cached by the previous call would look like a fast
link.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

_PERIOD = 251  # a prime, so that the pattern reveals a part at the wrong position
_BY_RANK = 31
_NOTHING = -1.0  # no rank contributes this value


def pattern(rank: int, elements: int, first: int = 0, device: str = "cpu") -> torch.Tensor:
    """Return the input of a rank from element `first` on, shape (elements,), float32."""
    places = torch.arange(first, first + elements, device=device)
    return ((places + _BY_RANK * rank) % _PERIOD).float()


def pattern_sum(ranks: int, elements: int, first: int = 0, device: str = "cpu") -> torch.Tensor:
    """Return the sum of the inputs of all ranks, shape (elements,), float32; exact up to 60,000 ranks."""
    places = torch.arange(_PERIOD, device=device)
    period = sum(((places + _BY_RANK * rank) % _PERIOD for rank in range(ranks)), torch.zeros_like(places))
    return period[torch.arange(first, first + elements, device=device) % _PERIOD].float()


@dataclass(frozen=True)
class CollectiveCase:
    """One operation, seen from `rank` of `ranks`, on `elements` elements in total. The root is rank 0.

    In send_recv, every rank sends to the next one and receives from the previous one, as in nccl-tests.
    """

    operation: str
    rank: int
    ranks: int
    elements: int
    device: str

    @property
    def part(self) -> int:
        """The number of elements per rank, if the operation splits the data."""
        return self.elements // self.ranks

    @property
    def neighbours(self) -> tuple[int, int]:
        """(the next rank, the previous rank)."""
        return (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks

    def contribution(self) -> torch.Tensor:
        if self.operation == "all_gather":
            return pattern(self.rank, self.part, device=self.device)
        if self.operation == "broadcast" and self.rank != 0:
            return torch.full((self.elements,), _NOTHING, device=self.device)
        return pattern(self.rank, self.elements, device=self.device)

    def expected(self) -> torch.Tensor | None:
        """Return the expected result on this rank; None if it receives none."""
        first, device = self.rank * self.part, self.device
        if self.operation == "all_reduce":
            return pattern_sum(self.ranks, self.elements, device=device)
        if self.operation == "reduce":
            return pattern_sum(self.ranks, self.elements, device=device) if self.rank == 0 else None
        if self.operation == "reduce_scatter":
            return pattern_sum(self.ranks, self.part, first, device)
        if self.operation == "all_gather":
            return torch.cat([pattern(rank, self.part, 0, device) for rank in range(self.ranks)])
        if self.operation == "all_to_all":
            return torch.cat([pattern(rank, self.part, first, device) for rank in range(self.ranks)])
        if self.operation == "broadcast":
            return pattern(0, self.elements, device=device)
        assert self.operation == "send_recv"
        return pattern(self.neighbours[1], self.elements, device=device)


class Room:
    """The buffers of a rank for all sizes: one to send from, one to receive into, of `elements` each."""

    def __init__(self, elements: int, device: str) -> None:
        self.device = device
        # Writing allocates every page: unwritten ones all map to one zero page, which is always cached.
        self._sent, self._received = (torch.full((elements,), 0.0, device=device) for _ in range(2))

    def clear(self) -> None:
        """Set all elements to zero, so that sums do not grow from call to call."""
        self._sent.zero_()
        self._received.zero_()

    def sent(self, elements: int, turn: int) -> torch.Tensor:
        """Return the part of the send buffer for call number `turn`."""
        return self._part(self._sent, elements, turn)

    def received(self, elements: int, turn: int) -> torch.Tensor:
        """Return the part of the receive buffer for call number `turn`."""
        return self._part(self._received, elements, turn)

    def _part(self, buffer: torch.Tensor, elements: int, turn: int) -> torch.Tensor:
        first = elements * (turn % (len(buffer) // elements))
        return buffer[first : first + elements]


@dataclass(frozen=True)
class Trial:
    """A method of calling one operation at one size.

    Attributes:
        call: runs call number `turn`, and returns the result on this rank, None if it receives none.
        sent: the input buffer of call number `turn`.
    """

    call: Callable[[int], torch.Tensor | None]
    sent: Callable[[int], torch.Tensor]
    case: CollectiveCase

    def count_wrong(self) -> int:
        """Make another call, and return the number of wrong elements on this rank."""
        self.sent(0).copy_(self.case.contribution())
        result, expected = self.call(0), self.case.expected()
        if expected is None:
            return 0
        if result is None or result.numel() != expected.numel():
            return expected.numel()
        return int((result != expected).sum())


def time_calls(call: Callable[[int], object], iterations: int, device: str) -> tuple[float, float]:
    """Return the (mean, median) seconds of sequential calls; on a GPU, measured with CUDA events.

    As in nccl-tests, the mean includes the time between calls.
    """
    durations = _gpu_durations(call, iterations) if device.startswith("cuda") else _cpu_durations(call, iterations)
    return sum(durations) / iterations, median(durations)


def _cpu_durations(call: Callable[[int], object], iterations: int) -> list[float]:
    moments = [time.perf_counter()]
    for turn in range(iterations):
        call(turn)
        moments.append(time.perf_counter())
    return [end - start for start, end in pairwise(moments)]


def _gpu_durations(call: Callable[[int], object], iterations: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for turn in range(iterations):
        call(turn)
        events[turn + 1].record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]

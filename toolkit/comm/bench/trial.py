"""One collective on its buffers: how it is called, and whether its result is right.

Ranks hand in whole numbers that differ by rank and place, small enough that floats add them up exactly. As nccl-tests
does, calls take turns on parts of a large buffer: what stands in a cache from the call before would look like a fast link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_PERIOD = 251  # a prime: parts at the wrong place show, since their lengths are no multiples of it
_BY_RANK = 31
NOTHING = -1.0  # what no rank hands in


def pattern(rank: int, elements: int, first: int = 0, device: str = "cpu") -> torch.Tensor:
    """What a rank hands in, shape (elements,), float32: its elements from `first` on."""
    places = torch.arange(first, first + elements, device=device)
    return ((places + _BY_RANK * rank) % _PERIOD).float()


def pattern_sum(ranks: int, elements: int, first: int = 0, device: str = "cpu") -> torch.Tensor:
    """What all ranks hand in, added up, shape (elements,), float32; exact to 60,000 ranks."""
    places = torch.arange(_PERIOD, device=device)
    period = sum(((places + _BY_RANK * rank) % _PERIOD for rank in range(ranks)), torch.zeros_like(places))
    return period[torch.arange(first, first + elements, device=device) % _PERIOD].float()


class Room:
    """The buffers of a rank, which all sizes share: one to send from, one to receive into, of `elements` each."""

    def __init__(self, elements: int, device: str) -> None:
        self.device = device
        # Written to, so that every page is there: pages that nobody wrote to are one page, and always cached.
        self._sent, self._received = (torch.full((elements,), 0.0, device=device) for _ in range(2))

    def clear(self) -> None:
        """Zeros, so that sums do not grow from call to call."""
        self._sent.zero_()
        self._received.zero_()

    def sent(self, elements: int, turn: int) -> torch.Tensor:
        """The part of the sending buffer whose turn it is."""
        return self._part(self._sent, elements, turn)

    def received(self, elements: int, turn: int) -> torch.Tensor:
        """The part of the receiving buffer whose turn it is."""
        return self._part(self._received, elements, turn)

    def _part(self, buffer: torch.Tensor, elements: int, turn: int) -> torch.Tensor:
        first = elements * (turn % (len(buffer) // elements))
        return buffer[first : first + elements]


@dataclass(frozen=True)
class Trial:
    """One way to call one operation at one size.

    `call(turn)` runs it and returns what this rank then holds, None where it holds nothing of the result. `handed_in`
    is what this rank puts into `sent(turn)` for the check, `expected` what it must hold then.
    """

    call: Callable[[int], torch.Tensor | None]
    sent: Callable[[int], torch.Tensor]
    handed_in: Callable[[], torch.Tensor]
    expected: Callable[[], torch.Tensor | None]

    def count_wrong(self) -> int:
        """Call once more, and count the elements that are wrong on this rank."""
        self.sent(0).copy_(self.handed_in())
        found, expected = self.call(0), self.expected()
        if expected is None:
            return 0
        if found is None or found.numel() != expected.numel():
            return expected.numel()
        return int((found != expected).sum())

"""The learning rate as a function of the optimizer steps already performed."""

import math
from dataclasses import dataclass
from typing import Any, Literal

Course = Literal["cosine", "linear", "constant", "one_cycle"]

ONE_CYCLE_START = 1 / 25  # initial rate as a fraction of the peak, as in torch's OneCycleLR


@dataclass
class Schedule:
    """Linear warmup from `start` to `peak`, then decay to `peak * min_ratio` at `steps`, or a constant rate.

    Only `taken`, the number of optimizer steps so far, changes and is saved in checkpoints. The curve comes from the
    job, so a run that resumes with more steps follows the new curve. Cosine: Loshchilov and Hutter, SGDR, arXiv
    1608.03983, equation 5 with one cycle. One cycle: Smith and Topin, Super-convergence, arXiv 1708.07120, with torch's
    two cosine halves and constant momentum.
    """

    peak: float
    steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.1
    kind: Course = "cosine"
    taken: int = 0
    start: float = 0.0

    def rate(self) -> float:
        """The learning rate of the next optimizer step."""
        return self.rate_at(self.taken)

    def rate_at(self, taken: int) -> float:
        """Return the learning rate of the step that follows `taken` steps."""
        if self.kind == "one_cycle":
            return self._one_cycle(taken)
        if taken < self.warmup_steps:
            return self.start + (self.peak - self.start) * (taken + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        done = min(1.0, (taken - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        lowest = self.peak * self.min_ratio
        if self.kind == "linear":
            return self.peak + (lowest - self.peak) * done
        return _half_cosine(self.peak, lowest, done)

    def _one_cycle(self, taken: int) -> float:
        """Return the one-cycle rate, which peaks at the last warmup step and is lowest at the last step."""
        highest_at = max(0, self.warmup_steps - 1)
        if taken < highest_at:
            return _half_cosine(self.peak * ONE_CYCLE_START, self.peak, taken / highest_at)
        done = min(1.0, (taken - highest_at) / max(1, self.steps - 1 - highest_at))
        return _half_cosine(self.peak, self.peak * self.min_ratio, done)

    def advance(self) -> None:
        self.taken += 1

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


def _half_cosine(first: float, last: float, done: float) -> float:
    return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * done))

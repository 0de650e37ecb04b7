"""The learning rate as a function of the optimizer steps already taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass
class Schedule:
    """Linear warmup to `peak`, then a cosine down to `peak * min_ratio` at `steps`, or constant.

    `taken` is the only part that changes: the optimizer steps taken so far. It goes into every checkpoint.
    The shape comes from the job, so a resumed run may be given more steps and follows the new curve.
    Cosine after warmup: Loshchilov and Hutter, SGDR, arXiv 1608.03983, equation 5 with one cycle.
    """

    peak: float
    steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.1
    kind: Literal["cosine", "constant"] = "cosine"
    taken: int = 0

    def rate(self) -> float:
        """The learning rate of the next optimizer step."""
        if self.taken < self.warmup_steps:
            return self.peak * (self.taken + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        length = max(1, self.steps - self.warmup_steps)
        done = min(1.0, (self.taken - self.warmup_steps) / length)
        lowest = self.peak * self.min_ratio
        return lowest + (self.peak - lowest) * 0.5 * (1.0 + math.cos(math.pi * done))

    def advance(self) -> None:
        self.taken += 1

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()` of an earlier life."""
        self.taken = state["taken"]

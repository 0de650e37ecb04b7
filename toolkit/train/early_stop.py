"""When to end a run that no longer gets better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass
class EarlyStop:
    """Counts validations without an improvement; give it to `TrainingState(extra={"early_stop": ...})`.

    Prechelt, Early Stopping - But When?, 1998, criterion UP with the best value in place of the one before. All ranks see
    the same values, so that they stop together. A NaN improves nothing.

    Args:
        patience: validations in a row without an improvement after which to stop.
        min_delta: an improvement on the best value is larger.
        mode: whether the smallest or the largest value is the best.
    """

    patience: int
    min_delta: float = 0.0
    mode: Literal["min", "max"] = "min"
    best: float | None = None
    best_step: int | None = None
    waited: int = 0

    def should_stop(self, value: float, step: int) -> bool:
        """Take in the value of a validation after `step` steps; True when the run is to end."""
        if self._improves(value):
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the run is to end, also one that was resumed with no more patience than it has spent."""
        return self.waited >= self.patience

    @property
    def why(self) -> str:
        """What the waiting has brought, in words."""
        last = "the last validation was" if self.waited == 1 else f"the last {self.waited} validations were"
        if self.best is None:
            return f"{last} no number"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        at = f" at step {self.best_step}" if self.best_step is not None else ""
        return f"{last} not better{by} than {self.best:.4f}{at}"

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()` of an earlier life."""
        self.best, self.waited = state["best"], state["waited"]
        self.best_step = state.get("best_step")  # older checkpoints lack it

"""Early stopping: end a run when its validations no longer improve."""

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass
class EarlyStop:
    """Counts validations without improvement; pass it to `TrainingState(extra={"early_stop": ...})`.

    This is criterion UP of Prechelt, Early Stopping - But When?, 1998, relative to the best value instead of the
    previous one. All ranks get the same values and stop together. NaN is never an improvement.

    Args:
        patience: consecutive validations without improvement before the stop.
        min_delta: the minimum difference that counts as an improvement.
        mode: whether smaller ("min") or larger ("max") values are better.
    """

    patience: int
    min_delta: float = 0.0
    mode: Literal["min", "max"] = "min"
    best: float | None = None
    best_step: int | None = None
    waited: int = 0

    def should_stop(self, value: float, step: int) -> bool:
        """Record the validation result after `step` steps; return True if the run must end."""
        if self._improves(value):
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1
        return self.is_over

    @property
    def is_over(self) -> bool:
        """True if the run must end; with a lower patience, a resumed run may be over before its first step."""
        return self.waited >= self.patience

    @property
    def why(self) -> str:
        """Return the reason for the stop, for log messages."""
        last = "the last validation" if self.waited == 1 else f"the last {self.waited} validations"
        if self.best is None:
            return f"{last} returned NaN"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        at = f" of step {self.best_step}" if self.best_step is not None else ""
        return f"{last} did not improve on {self.best:.4f}{at}{by}"

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
        self.best_step = state.get("best_step")  # older checkpoints lack it

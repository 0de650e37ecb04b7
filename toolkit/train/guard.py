"""Detect bad steps, whose loss or gradient norm is not finite or spikes, and choose the action for the caller."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.errors import ToolkitError

_TO_DEVIATION = 1.4826  # ratio of a normal distribution's standard deviation to its median absolute deviation
_SMALLEST_SHARE = 0.01  # minimum deviation of losses as a fraction of the median; nearly constant losses need one
# Minimum deviation of the logarithm of gradient norms. Norms of good steps differ by factors, which clipping handles.
# With 8 deviations, a spike is at least eleven times the median.
_SMALLEST_FACTOR = 0.3
_LEAST_STEPS = 8  # good steps before the first check for spikes


@dataclass(frozen=True)
class StepDecision:
    """The action to take after a backward pass. `line` is the full log message, `why` only the reason.

    `skip`: skip the update of this step and continue with the next samples. `roll_back`: load the last checkpoint and
    continue with the samples from `next_sample`.
    """

    action: Literal["go_on", "skip", "roll_back"]
    line: str = ""
    next_sample: int = 0
    why: str = ""


GO_ON = StepDecision("go_on")


class LossGuard:
    """Judges loss and gradient norm at each step; pass it to `TrainingState(extra={"guard": ...})`.

    All ranks pass the same numbers in the same order and reach the same decision. A spike is `deviations` robust
    standard deviations above the median of the last `window` good steps (Hampel, 1974: median and median absolute
    deviation, which earlier spikes do not shift); norms are compared by their logarithm. The training of PaLM rolled
    back and skipped the samples of a spike, too (Chowdhery et al., arXiv 2204.02311, section 5.1).

    Args:
        policy: the action for a bad step; "off" accepts every step.
        limit: bad steps allowed in the whole run.
    """

    def __init__(
        self, policy: Literal["off", "skip", "roll_back"], *, deviations: float = 8.0, window: int = 64, limit: int = 10
    ) -> None:
        self.policy = policy
        self.deviations = deviations
        self.limit = limit
        self.bad_steps = 0
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)

    def judge(self, step: int, loss: float, samples: range | Sequence[int], norm: float | None = None) -> StepDecision:
        """Judge a step on these global samples, before its update.

        Args:
            norm: the gradient norm before clipping; None skips this check.

        Raises:
            ToolkitError: the step is bad, and the run has had `limit` bad steps.
        """
        if self.policy == "off":
            return GO_ON
        why = self._why_loss(loss) or ("" if norm is None else self._why_norm(norm))
        if not why:
            self._losses.append(loss)
            if norm is not None:
                self._norms.append(norm)
            return GO_ON
        self.bad_steps += 1
        if self.bad_steps > self.limit:
            raise ToolkitError(
                f"{why} at step {step}, and the run has already had the allowed {self.limit} bad steps",
                where="train.guard_limit",
                fix="lower train.lr, raise train.warmup_steps, or inspect the samples that the log names; "
                "a larger train.guard_limit allows more bad steps",
            )
        first, after = samples[0], samples[-1] + 1
        which = (
            f"step {step}: {why} (samples {first} to {after - 1}; bad step {self.bad_steps} of {self.limit} allowed)"
        )
        if self.policy == "skip":
            return StepDecision("skip", f"{which}: skipping its update", after, which)
        return StepDecision(
            "roll_back",
            f"{which}: rolling back to the last checkpoint and continuing from sample {after}",
            after,
            which,
        )

    def _why_loss(self, loss: float) -> str:
        """Return why this loss is bad, or "" if it is good."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        limit = self._limit(self._losses, lambda middle: _SMALLEST_SHARE * abs(middle))
        return f"the loss is {loss:.6g}, a spike above {limit:.6g}" if loss > limit else ""

    def _why_norm(self, norm: float) -> str:
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        logarithms = [math.log(one) for one in self._norms if one > 0]
        limit = math.exp(self._limit(logarithms, lambda middle: _SMALLEST_FACTOR))
        return f"the gradient norm is {norm:.6g}, a spike above {limit:.6g}" if norm > limit else ""

    def _limit(self, good: Collection[float], smallest: Callable[[float], float]) -> float:
        """Return the value above which a step is a spike; the deviation is at least `smallest(median)`."""
        if len(good) < _LEAST_STEPS:
            return math.inf
        middle = statistics.median(good)
        deviation = _TO_DEVIATION * statistics.median(abs(one - middle) for one in good)
        return middle + self.deviations * max(deviation, smallest(middle))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "norms": list(self._norms), "bad_steps": self.bad_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of an earlier attempt; a roll-back does not lower the count of bad steps."""
        self._losses = deque(state["losses"], maxlen=self._losses.maxlen)
        self._norms = deque(state.get("norms", ()), maxlen=self._norms.maxlen)  # missing in checkpoints of version 0.1
        self.bad_steps = max(self.bad_steps, state["bad_steps"])

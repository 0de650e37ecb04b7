"""Decides what follows a bad step, whose loss or gradient norm is not finite or a spike. It changes nothing itself."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.errors import ToolkitError

_TO_DEVIATION = 1.4826  # median absolute deviation of a normal distribution to its standard deviation
_SMALLEST_SHARE = 0.01  # of the median: losses that hardly move make no spike of the next small move
# Of a norm's logarithm. Norms of good steps differ by factors, which clipping is for: with 8 deviations a spike is eleven
# times the median at least.
_SMALLEST_FACTOR = 0.3
_LEAST_STEPS = 8  # before that nothing is called a spike


@dataclass(frozen=True)
class Verdict:
    """What to do after a backward pass; `line` says it, and why, which `why` says alone.

    `skip`: omit the update of this step, and continue with the next samples. `roll_back`: load the last checkpoint, and
    then go on with the samples from `next_sample`, past those since.
    """

    action: Literal["go_on", "skip", "roll_back"]
    line: str = ""
    next_sample: int = 0
    why: str = ""


GO_ON = Verdict("go_on")


class LossGuard:
    """Judges the loss and the gradient's norm of all ranks at each step; give it to `TrainingState(extra={"guard": ...})`.

    All ranks give the same numbers, in the same order, and so come to the same verdict. A spike lies `deviations` robust
    standard deviations above the median of the last `window` good steps (Hampel, 1974: median and median absolute
    deviation, which the spikes before do not move); of norms the logarithm is looked at. Rolling back and going past the
    samples is how PaLM was trained (Chowdhery et al., arXiv 2204.02311, section 5.1).

    Args:
        policy: what a bad step leads to; "off" lets all through.
        limit: bad steps over the whole run, after which the next one ends it.
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

    def judge(self, step: int, loss: float, samples: range | Sequence[int], norm: float | None = None) -> Verdict:
        """Take in a step on these global samples, before its update.

        Args:
            norm: the gradient's, before clipping; None leaves it out.

        Raises:
            ToolkitError: it is bad, and the run has had as many bad steps as it may.
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
                f"{why} at step {step}, after {self.limit} bad steps before",
                where="train.guard_limit",
                fix="lower train.lr, raise train.warmup_steps, or inspect the samples that the log names; "
                "a larger train.guard_limit lets more of them pass",
            )
        first, after = samples[0], samples[-1] + 1
        which = (
            f"step {step}: {why} (samples {first} to {after - 1}; bad step {self.bad_steps} of {self.limit} allowed)"
        )
        if self.policy == "skip":
            return Verdict("skip", f"{which}: its update is skipped", after, which)
        return Verdict("roll_back", f"{which}: back to the last checkpoint, and on from sample {after}", after, which)

    def _why_loss(self, loss: float) -> str:
        """What is wrong with this loss; empty where nothing is."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        limit = self._limit(self._losses, lambda middle: _SMALLEST_SHARE * abs(middle))
        return f"the loss is {loss:.6g}, a spike above {limit:.6g}" if loss > limit else ""

    def _why_norm(self, norm: float) -> str:
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm}"
        logarithms = [math.log(one) for one in self._norms if one > 0]
        limit = math.exp(self._limit(logarithms, lambda middle: _SMALLEST_FACTOR))
        return f"the gradient's norm is {norm:.6g}, a spike above {limit:.6g}" if norm > limit else ""

    def _limit(self, good: Collection[float], smallest: Callable[[float], float]) -> float:
        """Above it lies a spike. The deviation is `smallest` of the median at least."""
        if len(good) < _LEAST_STEPS:
            return math.inf
        middle = statistics.median(good)
        deviation = _TO_DEVIATION * statistics.median(abs(one - middle) for one in good)
        return middle + self.deviations * max(deviation, smallest(middle))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"losses": list(self._losses), "norms": list(self._norms), "bad_steps": self.bad_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an earlier start. A roll-back does not undo the count of the bad step that caused it."""
        self._losses = deque(state["losses"], maxlen=self._losses.maxlen)
        self._norms = deque(state.get("norms", ()), maxlen=self._norms.maxlen)  # none in checkpoints of version 0.1
        self.bad_steps = max(self.bad_steps, state["bad_steps"])

"""What a bad loss leads to: one that is no number, or a spike. Decides, and does nothing itself."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.errors import ToolkitError

_TO_DEVIATION = 1.4826  # median absolute deviation of a normal distribution to its standard deviation
_SMALLEST_SHARE = 0.01  # of the median: losses that hardly move make no spike of the next small move
_LEAST_LOSSES = 8  # before that no loss is called a spike


@dataclass(frozen=True)
class Verdict:
    """What to do after a backward pass, and why, in one line.

    `skip`: leave out the update of this step, and go on with the next samples. `roll_back`: load the last checkpoint, and
    then go on with the samples from `next_sample`, past those since.
    """

    action: Literal["go_on", "skip", "roll_back"]
    line: str = ""
    next_sample: int = 0


GO_ON = Verdict("go_on")


class LossGuard:
    """Judges the loss of all ranks at each step; give it to `TrainingState(extra={"guard": ...})`.

    All ranks give the same losses, in the same order, and so come to the same verdict. A spike lies `deviations` robust
    standard deviations above the median of the last `window` good losses (Hampel, 1974: median and median absolute
    deviation, which the spikes before do not move). Rolling back and going past the samples is how PaLM was trained
    (Chowdhery et al., arXiv 2204.02311, section 5.1).

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

    def judge(self, step: int, loss: float, samples: range | Sequence[int]) -> Verdict:
        """Take in the loss of a step on these global samples, before its update.

        Raises:
            ToolkitError: it is bad, and the run has had as many bad steps as it may.
        """
        if self.policy == "off":
            return GO_ON
        why = self._why(loss)
        if not why:
            self._losses.append(loss)
            return GO_ON
        self.bad_steps += 1
        if self.bad_steps > self.limit:
            raise ToolkitError(
                f"{why} at step {step}, after {self.limit} bad steps before",
                where="train.guard_limit",
                fix="lower train.lr, raise train.warmup_steps, or look at the samples that the log names; "
                "a larger train.guard_limit lets more of them pass",
            )
        first, after = samples[0], samples[-1] + 1
        which = (
            f"step {step}: {why} (samples {first} to {after - 1}; bad step {self.bad_steps} of {self.limit} allowed)"
        )
        if self.policy == "skip":
            return Verdict("skip", f"{which}: its update is left out", after)
        return Verdict("roll_back", f"{which}: back to the last checkpoint, and on from sample {after}", after)

    def _why(self, loss: float) -> str:
        """What is wrong with this loss; empty where nothing is."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if len(self._losses) < _LEAST_LOSSES:
            return ""
        middle = statistics.median(self._losses)
        deviation = _TO_DEVIATION * statistics.median(abs(one - middle) for one in self._losses)
        limit = middle + self.deviations * max(deviation, _SMALLEST_SHARE * abs(middle))
        return f"the loss is {loss:.6g}, a spike above {limit:.6g}" if loss > limit else ""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"losses": list(self._losses), "bad_steps": self.bad_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()` of an earlier life. A roll-back does not give back the bad step that led to it."""
        self._losses = deque(state["losses"], maxlen=self._losses.maxlen)
        self.bad_steps = max(self.bad_steps, state["bad_steps"])

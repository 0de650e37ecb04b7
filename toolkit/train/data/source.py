"""What a loader reads from: samples by position, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# Makes one batch of the samples that a source has read.
Collate = Callable[[list[Any]], Any]


class Source(Protocol):
    """Samples at the positions [0, count). A source goes to worker processes, so it opens its files there."""

    @property
    def count(self) -> int | None:
        """How many samples an epoch has; None for a stream, which is read in its own order."""

    @property
    def most_workers(self) -> int | None:
        """More worker processes than this are of no use; None has no limit."""

    def take(self, positions: NDArray[np.int64]) -> Any:
        """The batch of these samples, in this order: tensors, or tuples and dicts of them."""

    def finished(self, batch: Any) -> Any:
        """What the training is given, made of what `take` gave once that is on the rank's device."""

    def drain_skips(self) -> list[str]:
        """Which samples were replaced since this was last asked, each as the place and what is wrong there."""

"""The interface of data sources, which return batches of samples by position, and a source for part of another one."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ToolkitError

# Collates the samples that a source has read into one batch.
Collate = Callable[[list[Any]], Any]


class Source(Protocol):
    """Samples at the positions [0, count). A source is copied to worker processes and opens its files there."""

    @property
    def count(self) -> int | None:
        """The number of samples per epoch; None for a stream, which is read in its own order."""

    @property
    def most_workers(self) -> int | None:
        """The maximum useful number of worker processes; None means no limit."""

    def take(self, positions: NDArray[np.int64]) -> Any:
        """Return the batch of these samples, in this order: tensors, or tuples and dicts of them."""

    def finished(self, batch: Any) -> Any:
        """Convert a batch on the rank's device to the form that the training step expects."""

    def drain_skips(self) -> list[str]:
        """Return the place and the error of each sample that was replaced since the last call."""


class PartOfSource:
    """The `count` samples of `source` that start at the position `first`."""

    def __init__(self, source: Source, first: int, count: int) -> None:
        known = source.count
        if known is None or first < 0 or count < 1 or first + count > known:
            has = "a stream has no positions" if known is None else f"the source has {known} samples"
            raise ToolkitError(
                f"cannot select samples {first} to {first + count - 1}: {has}",
                where="source",
                fix="choose one or more existing samples",
            )
        self.source, self.first, self.count = source, first, count

    @property
    def most_workers(self) -> int | None:
        return self.source.most_workers

    def take(self, positions: NDArray[np.int64]) -> Any:
        return self.source.take(positions + self.first)

    def finished(self, batch: Any) -> Any:
        return self.source.finished(batch)

    def drain_skips(self) -> list[str]:
        return self.source.drain_skips()


def hold_out(source: Source, share: float) -> tuple[Source, Source | None]:
    """Split off the last fraction `share` of a source; return the training part, and the fraction or None if empty."""
    count = source.count
    held_out = 0 if count is None else int(count * share)
    if count is None or not held_out:
        return source, None
    return PartOfSource(source, 0, count - held_out), PartOfSource(source, count - held_out, held_out)

"""The interface of data sources: samples by position, a batch at a time; and a part of a source."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ToolkitError

# Collates the samples that a source has read into one batch.
Collate = Callable[[list[Any]], Any]


class Source(Protocol):
    """Samples at the positions [0, count). A source is sent to worker processes and opens its files there."""

    @property
    def count(self) -> int | None:
        """The samples of an epoch; None for a stream, which is read in its own order."""

    @property
    def most_workers(self) -> int | None:
        """The maximum useful number of worker processes; None without a limit."""

    def take(self, positions: NDArray[np.int64]) -> Any:
        """Return the batch of these samples, in this order: tensors, or tuples and dicts of them."""

    def finished(self, batch: Any) -> Any:
        """Return the training's input from a batch on the rank's device."""

    def drain_skips(self) -> list[str]:
        """Return the samples replaced since the last call, each as its place and fault."""


class PartOfSource:
    """The `count` samples of `source` from the position `first` on."""

    def __init__(self, source: Source, first: int, count: int) -> None:
        known = source.count
        if known is None or first < 0 or count < 1 or first + count > known:
            has = "a stream has no positions" if known is None else f"{known} samples"
            raise ToolkitError(
                f"samples {first} to {first + count - 1} of {has}",
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
    """Split a source into the training part and the last `share`, which is None if it has no sample."""
    count = source.count
    held_out = 0 if count is None else int(count * share)
    if count is None or not held_out:
        return source, None
    return PartOfSource(source, 0, count - held_out), PartOfSource(source, count - held_out, held_out)

"""Some samples of a source, as those that are held out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ToolkitError
from toolkit.train.data.source import Source


class PartOfSource:
    """The `count` samples of `source` from the position `first` on."""

    def __init__(self, source: Source, first: int, count: int) -> None:
        known = source.count
        if known is None or first < 0 or count < 1 or first + count > known:
            has = "a stream, whose samples have no positions" if known is None else f"{known} samples"
            raise ToolkitError(
                f"samples {first} to {first + count - 1} of {has}",
                where="source",
                fix="name one or more that are there",
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
    """Split a source: the training part, and the last `share` of the source, which is None if it has no sample."""
    count = source.count
    held_out = 0 if count is None else int(count * share)
    if count is None or not held_out:
        return source, None
    return PartOfSource(source, 0, count - held_out), PartOfSource(source, count - held_out, held_out)

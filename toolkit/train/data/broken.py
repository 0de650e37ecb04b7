"""Records that cannot be read: named by file and record, and fatal or replaced, as `[data] broken` says."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ToolkitError
from toolkit.terminal.talk import say
from toolkit.train.data.source import Collate

Broken = Literal["fail", "skip"]
MOST_IN_A_ROW = 100  # this many consecutive broken records are not an accident
FEWEST_JUDGED = 1000  # samples; of fewer, a single broken one would be a large share
TOLD_EVERY = 100  # skips


class BrokenRecordError(ToolkitError):
    """One record that cannot be read; `where` names its file and line, or its index."""


def broken_by(error: Exception, where: str) -> BrokenRecordError:
    """Name the record in which a user's code, or a library, failed, and the line of code that did."""
    frames = traceback.extract_tb(error.__traceback__)
    code = f" (in {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return BrokenRecordError(
        f"{type(error).__name__}: {error}{code}",
        where=where,
        fix='fix or remove the record, or set data.broken = "skip"',
    )


class RecordSource(ABC):
    """A source whose samples are read one by one, so that one of them can be broken.

    With `broken` "skip" the next valid record replaces a broken one. That depends on the position alone:
    whatever the number of ranks, every other sample stays where it was.
    """

    most_workers: int | None = None

    def __init__(self, collate: Collate, broken: Broken) -> None:
        self.collate = collate
        self.broken = broken
        self._skips: list[str] = []

    @property
    @abstractmethod
    def count(self) -> int | None:
        """How many records there are."""

    @abstractmethod
    def read(self, position: int) -> Any:
        """One record.

        Raises:
            BrokenRecordError: it cannot be read.
        """

    def read_all(self, positions: NDArray[np.int64]) -> list[Any]:
        """Several records at once, where a source has a faster way than one by one.

        Raises:
            BrokenRecordError: one of them cannot be read; they are read one by one then.
        """
        return [self.read(position) for position in positions.tolist()]

    def take(self, positions: NDArray[np.int64]) -> Any:
        try:
            samples = self.read_all(positions)
        except BrokenRecordError:
            # One by one: a fast way may not know which record it was.
            samples = [self.read_or_replace(position) for position in positions.tolist()]
        return self.batch_of(samples)

    def batch_of(self, samples: list[Any]) -> Any:
        """The samples as one batch.

        Raises:
            ToolkitError: they do not fit together.
        """
        try:
            return self.collate(samples)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise ToolkitError(
                f"{len(samples)} samples make no batch: {error}",
                where=type(self).__name__,
                fix="give a collate of your own; PadSamples() makes sequences equally long",
            ) from error

    def finished(self, batch: Any) -> Any:
        return batch

    def drain_skips(self) -> list[str]:
        skips, self._skips = self._skips, []
        return skips

    def read_or_replace(self, position: int) -> Any:
        """One record, or the valid one that replaces it."""
        tries = MOST_IN_A_ROW if self.count is None else min(MOST_IN_A_ROW, self.count)
        for distance in range(tries):
            candidate = position + distance
            try:
                return self.read(candidate if self.count is None else candidate % self.count)
            except BrokenRecordError as error:
                if self.broken == "fail":
                    raise
                if distance == 0:
                    self._skips.append(f"{error.where}: {error.message}")
                last = error
        raise BrokenRecordError(
            f"{tries} records in a row are broken; the last: {last.message}",
            where=last.where,
            fix="fix the data, or the code that reads it",
        )


class SkipCount:
    """How many samples this rank has read, and how many of them were replaced."""

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self.read = 0
        self.skipped = 0
        self.last = ""  # which was replaced last, and why
        self._tell = tell or say

    def add(self, read: int, skips: Sequence[str]) -> None:
        """Count a batch; say the first skip and each hundredth."""
        self.read += read
        for skip in skips:
            self.skipped, self.last = self.skipped + 1, skip
            if self.skipped % TOLD_EVERY == 1:
                self._tell(f"skipped {self.skipped:,} of {self.read:,} samples read; the last is broken: {skip}")


def check_share(limit: float, read: int, skipped: int, last: Callable[[], str]) -> None:
    """Refuse to go on with data of which too much was replaced.

    Args:
        limit: the largest share of the samples read that may be replaced, in [0, 1].
        last: tells which was replaced last; asked for an error alone.

    Raises:
        ToolkitError: the share is above the limit.
    """
    if skipped > limit * max(read, FEWEST_JUDGED):
        raise ToolkitError(
            f"{skipped:,} of {read:,} samples read are broken, more than a share of {limit:g}; the last: {last()}",
            where="data.broken_limit",
            fix="fix the data, or allow a larger share with data.broken_limit",
        )

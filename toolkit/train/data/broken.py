"""Broken records, which cannot be read: report their file and position, then fail or replace them (`[data] broken`)."""

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
from toolkit.train.gather_names import of_all_ranks
from toolkit.world.facts import World

Broken = Literal["fail", "skip"]
MOST_IN_A_ROW = 100  # more consecutive broken records indicate a systematic fault
FEWEST_JUDGED = 1000  # the fraction is not checked for fewer samples, because one broken sample would exceed the limit
TOLD_EVERY = 100  # skips per log line


class BrokenRecordError(ToolkitError):
    """A record that cannot be read; `where` names its file and line, or its index."""


def broken_by(error: Exception, where: str) -> BrokenRecordError:
    """Return an error that names the record on which a user's code or a library failed, and the failing line of code."""
    frames = traceback.extract_tb(error.__traceback__)
    code = f" (in {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return BrokenRecordError(
        f"{type(error).__name__}: {error}{code}",
        where=where,
        fix='fix or remove the record, or set data.broken = "skip"',
    )


class RecordSource(ABC):
    """A source that reads samples one by one, so that a single one can be broken.

    If `broken` is "skip", the next valid record replaces a broken one. The replacement depends only on the position, so
    every sample is the same for any number of ranks.
    """

    most_workers: int | None = None

    def __init__(self, collate: Collate, broken: Broken) -> None:
        self.collate = collate
        self.broken = broken
        self._skips: list[str] = []

    @property
    @abstractmethod
    def count(self) -> int | None:
        """Return the number of records."""

    @abstractmethod
    def read(self, position: int) -> Any:
        """Read one record.

        Raises:
            BrokenRecordError: it cannot be read.
        """

    def read_all(self, positions: NDArray[np.int64]) -> list[Any]:
        """Read several records; override this if the source can read them faster than one by one.

        Raises:
            BrokenRecordError: one of them cannot be read; the caller then reads them one by one.
        """
        return [self.read(position) for position in positions.tolist()]

    def take(self, positions: NDArray[np.int64]) -> Any:
        try:
            samples = self.read_all(positions)
        except BrokenRecordError:
            # `read_all` may not know which record is broken, so read them one by one.
            samples = [self.read_or_replace(position) for position in positions.tolist()]
        return self.batch_of(samples)

    def batch_of(self, samples: list[Any]) -> Any:
        """Collate the samples into one batch.

        Raises:
            ToolkitError: the samples do not fit together.
        """
        try:
            return self.collate(samples)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise ToolkitError(
                f"cannot collate {len(samples)} samples into a batch: {error}",
                where=type(self).__name__,
                fix="pass a collate function for these samples; PadSamples() pads sequences to one length",
            ) from error

    def finished(self, batch: Any) -> Any:
        return batch

    def drain_skips(self) -> list[str]:
        skips, self._skips = self._skips, []
        return skips

    def read_or_replace(self, position: int) -> Any:
        """Return a record, or its valid replacement if it is broken."""
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
            f"{tries} consecutive records are broken; the last: {last.message}",
            where=last.where,
            fix="fix the data, or the code that reads it",
        )


class SkipCount:
    """Counts the samples that this rank has read, and those that it has replaced."""

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self.read = 0
        self.skipped = 0
        self.last = ""  # the last replaced sample, and why it was replaced
        self._tell = tell or say

    def add(self, read: int, skips: Sequence[str]) -> None:
        """Count a batch; log the first skip and each hundredth."""
        self.read += read
        for skip in skips:
            self.skipped, self.last = self.skipped + 1, skip
            if self.skipped % TOLD_EVERY == 1:
                self._tell(f"skipped {self.skipped:,} of {self.read:,} samples read; the last broken one: {skip}")


def check_share(limit: float, read: int, skipped: int, last: Callable[[], str]) -> None:
    """Reject data with too many replaced samples.

    Args:
        limit: the maximum fraction of the samples read that may be replaced, in [0, 1].
        last: returns the last replaced sample; called only if an error is raised.

    Raises:
        ToolkitError: the fraction is above the limit.
    """
    if skipped > limit * max(read, FEWEST_JUDGED):
        raise ToolkitError(
            f"{skipped:,} of {read:,} samples are broken, more than the allowed fraction {limit:g}; the last: {last()}",
            where="data.broken_limit",
            fix="fix the data, or allow a larger fraction with data.broken_limit",
        )


class BrokenShare:
    """Counts the samples that all ranks have read and replaced since the start of this attempt.

    Args:
        own: counts the samples of this rank.
        limit: the maximum fraction of the samples of all ranks that may be replaced, in [0, 1].
        counts: False if another rank reads and counts the same samples.
    """

    def __init__(self, world: World, own: SkipCount, limit: float, *, counts: bool) -> None:
        self._world, self._own, self._limit, self._counts = world, own, limit, counts
        self._given = own.skipped  # samples replaced in a trial step do not count yet: they are read again
        self._read = self._skipped = 0

    def new(self) -> int:
        """Return the number of samples of this rank that were replaced since the last call."""
        new, self._given = self._own.skipped - self._given, self._own.skipped
        return new if self._counts else 0

    def add(self, read: int, skipped: int) -> None:
        """Add the number of samples that all ranks read in a step, and of those replaced (sum of `new`). Collective.

        Raises:
            ToolkitError: the fraction is above the limit; on all ranks.
        """
        self._read, self._skipped = self._read + read, self._skipped + skipped
        if skipped:
            check_share(self._limit, self._read, self._skipped, self._last)

    def _last(self) -> str:
        """Return the last replaced sample of this rank, or of another one. Collective."""
        own = {"last": self._own.last} if self._own.last else {}
        return of_all_ranks(self._world, own)["last"]

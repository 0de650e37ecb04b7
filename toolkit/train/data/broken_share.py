"""The share of broken samples over all ranks, added up by the training loop, where it costs no exchange of its own."""

from __future__ import annotations

from toolkit.train.data.broken import SkipCount, check_share
from toolkit.train.gather_names import of_all_ranks
from toolkit.world.facts import World


class BrokenShare:
    """What all ranks have read and replaced since this attempt began.

    Args:
        own: counts the samples of this rank.
        limit: the largest share of the samples of all ranks that may be replaced, in [0, 1].
        counts: False where another rank reads the same samples, and counts them.
    """

    def __init__(self, world: World, own: SkipCount, limit: float, *, counts: bool) -> None:
        self._world, self._own, self._limit, self._counts = world, own, limit, counts
        self._given = own.skipped  # what was replaced in a trial is read again, and counts then
        self._read = self._skipped = 0

    def new(self) -> int:
        """How many samples of this rank were replaced since this was last asked."""
        new, self._given = self._own.skipped - self._given, self._own.skipped
        return new if self._counts else 0

    def add(self, read: int, skipped: int) -> None:
        """Take in how many samples all ranks have read in a step, and the sum of their `new`. Collective.

        Raises:
            ToolkitError: the share is above the limit; on all ranks.
        """
        self._read, self._skipped = self._read + read, self._skipped + skipped
        if skipped:
            check_share(self._limit, self._read, self._skipped, self._last)

    def _last(self) -> str:
        """What was replaced last here, or on another rank where nothing was here. Collective."""
        own = {"last": self._own.last} if self._own.last else {}
        return of_all_ranks(self._world, own)["last"]

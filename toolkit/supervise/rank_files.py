"""The records that ranks write at their start, read by the processes that outlive them; and ranks' names in a sentence."""

from collections.abc import Sequence
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import AttemptDirectory, rank_of
from toolkit.supervise.log import say

__all__ = ["begun_ranks"]

NAMED = 8


def begun_ranks(attempt: AttemptDirectory) -> list[int]:
    """The ranks that have started, in order."""
    return sorted(map(rank_of, attempt.ranks.glob("rank-*.json")))


def rank_record(attempt: AttemptDirectory, rank: int) -> dict[str, Any] | None:
    """Host and process of a rank; None before its start, and if a lost node left half a file.

    Ranks write it without fsync, since all of them write one at the same time.
    """
    try:
        record: dict[str, Any] | None = read_json_or_none(attempt.rank_file(rank))
    except ToolkitError as error:
        say(f"the host of rank {rank} is unknown: {error.message}")
        return None
    return record


def host_of(attempt: AttemptDirectory, rank: int) -> str | None:
    """The host that a rank ran on; None if it is unknown."""
    record = rank_record(attempt, rank)
    return None if record is None else str(record["host"])


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more`."""
    if not ranks:
        return "a rank"
    listed = ", ".join(map(str, ranks[:NAMED])) + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"

"""Read the records that ranks write when they start, and format rank numbers for messages."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import AttemptDirectory, rank_of
from toolkit.supervise.log import say

__all__ = ["begun_ranks", "host_of"]

NAMED = 8


def begun_ranks(attempt: AttemptDirectory) -> list[int]:
    """Return the ranks that have started, in order."""
    return sorted(map(rank_of, attempt.ranks.glob("rank-*.json")))


def rank_record(attempt: AttemptDirectory, rank: int) -> dict[str, Any] | None:
    """Return the host and pid that a rank recorded; None if it has not started, or if a lost node truncated the file.

    Ranks write their records without fsync, since all of them write at the same time.
    """
    try:
        record: dict[str, Any] | None = read_json_or_none(attempt.rank_file(rank))
    except ToolkitError as error:
        say(f"the host of rank {rank} is unknown: {error.message}")
        return None
    return record


def host_of(attempt: AttemptDirectory, rank: int) -> str | None:
    """Return the host that a rank ran on; None if it is unknown."""
    record = rank_record(attempt, rank)
    return None if record is None else str(record["host"])


def signal_guards_here(attempt: AttemptDirectory, number: int) -> bool:
    """Signal the guards, as mpirun does not; return False if some run on other hosts, or the run directory is unreadable."""
    try:
        records = [one for rank in begun_ranks(attempt) if (one := rank_record(attempt, rank)) is not None]
    except OSError as error:
        say(f"cannot read the processes of the ranks: {error.strerror}")
        return False
    here = [one for one in records if one["host"] == socket.gethostname()]
    for one in here:
        if is_guard(one["pid"]):
            with suppress(ProcessLookupError):
                os.kill(one["pid"], number)
    return bool(here) and len(here) == len(records)


def is_guard(pid: int) -> bool:
    """Return whether a process is the guard of a rank."""
    try:
        return b"toolkit.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def named(ranks: Sequence[int]) -> str:
    """Format ranks for a message: `rank 3`, or `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more`."""
    if not ranks:
        return "a rank"
    listed = ", ".join(map(str, ranks[:NAMED])) + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"

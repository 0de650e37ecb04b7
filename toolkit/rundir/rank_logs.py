"""Finds the log of a rank, which is its own file, or a file per node if the job has many ranks.

65,536 ranks with one file each would overload a metadata server. In a file per node, each line starts with its rank:
`[17] loss 0.3`. The same applies to the Slurm log of a finished task, which contains the logs of its ranks.
"""

import re
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json_or_none, tail_text
from toolkit.rundir.layout import AttemptDirectory

__all__ = ["find_log", "is_shared", "label_of", "labelled_rank", "line_of", "log_of", "node_logs", "tail_of"]

MOST_FILES = 64  # the highest number of ranks with one log each
SEARCHED_BYTES = 1 << 20  # how much of a node log is searched for the last lines of one rank
_LABEL = re.compile(r"\[(\d+)\] ", re.ASCII)


def log_of(attempt: AttemptDirectory, rank: int, *, ranks: int, host: str) -> Path:
    """Return the log to which a rank on `host` writes, in an attempt with `ranks` ranks."""
    return attempt.log_file(rank) if ranks <= MOST_FILES else attempt.node_log(host)


def label_of(rank: int) -> str:
    """Return the prefix of each line that a rank writes to a shared log."""
    return f"[{rank}] "


def is_shared(log: Path) -> bool:
    """Return True if several ranks share the log, so that each line starts with its rank."""
    return not log.name.startswith("rank-")


def labelled_rank(line: str) -> int | None:
    """Return the rank that wrote a line of a shared log, or None for a line of the supervisor."""
    match = _LABEL.match(line)
    return int(match[1]) if match else None


def node_logs(attempt: AttemptDirectory) -> list[Path]:
    """Return the node logs of an attempt; [] if each rank has its own log."""
    return sorted(attempt.logs.glob("node-*.log"))


def find_log(attempt: AttemptDirectory, rank: int) -> Path:
    """Return the log that contains the lines of a rank; if none exists, the path that the rank's own log would have."""
    shared = node_logs(attempt)
    if not shared:
        return attempt.log_file(rank)
    try:
        record = read_json_or_none(attempt.rank_file(rank)) or {}
    except ToolkitError:  # a lost node may leave an incomplete file
        record = {}
    named = attempt.node_log(str(record.get("host", "")))
    return named if named in shared else attempt.log_file(rank)


def line_of(log: Path, line: str, *, rank: int | None) -> str | None:
    """Return a log line as shown for a rank (for all if `rank` is None), or None if another writer wrote it.

    For a single rank the label is removed. The Slurm log also contains lines of the supervisor, which are not shown.
    """
    if not is_shared(log):
        return line
    if rank is None:
        return line if _LABEL.match(line) or log.name.startswith("node-") else None
    label = label_of(rank)
    return line.removeprefix(label) if line.startswith(label) else None


def tail_of(attempt: AttemptDirectory, rank: int, lines: int) -> list[str]:
    """Return the last lines that a rank has written; [] if there are none."""
    log = find_log(attempt, rank)
    if log == attempt.log_file(rank):
        return tail_text(log, lines)
    every = (line_of(log, line, rank=rank) for line in tail_text(log, SEARCHED_BYTES, limit_bytes=SEARCHED_BYTES))
    return [line for line in every if line is not None][-lines:]

"""The log of a rank: its own file, or the file of its node if a job has many ranks.

65,536 ranks with one file each would overload a metadata server. In a shared file each line starts with its rank,
`[17] loss 0.3`; so do the lines in Slurm's log of a done task, which contains the logs of its ranks.
"""

import re
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json_or_none, tail_text
from toolkit.rundir.layout import AttemptDirectory

__all__ = ["find_log", "is_shared", "label_of", "labelled_rank", "line_of", "log_of", "node_logs", "tail_of"]

MOST_FILES = 64  # ranks with their own log
SEARCHED_BYTES = 1 << 20  # in a node's log, for the last lines of one rank
_LABEL = re.compile(r"\[(\d+)\] ", re.ASCII)


def log_of(attempt: AttemptDirectory, rank: int, *, ranks: int, host: str) -> Path:
    """The file that a rank on `host`, one of `ranks`, writes to."""
    return attempt.log_file(rank) if ranks <= MOST_FILES else attempt.node_log(host)


def label_of(rank: int) -> str:
    """The prefix of each line of a rank in a shared file."""
    return f"[{rank}] "


def is_shared(log: Path) -> bool:
    """True if each line starts with its rank."""
    return not log.name.startswith("rank-")


def labelled_rank(line: str) -> int | None:
    """The rank of a line of a shared file; None for a line of the supervisor."""
    match = _LABEL.match(line)
    return int(match[1]) if match else None


def node_logs(attempt: AttemptDirectory) -> list[Path]:
    """The logs of an attempt's nodes; [] if each rank has its own."""
    return sorted(attempt.logs.glob("node-*.log"))


def find_log(attempt: AttemptDirectory, rank: int) -> Path:
    """The log with a rank's lines; the path of its own log if there is none."""
    shared = node_logs(attempt)
    if not shared:
        return attempt.log_file(rank)
    try:
        record = read_json_or_none(attempt.rank_file(rank)) or {}
    except ToolkitError:  # a lost node leaves half a file
        record = {}
    named = attempt.node_log(str(record.get("host", "")))
    return named if named in shared else attempt.log_file(rank)


def line_of(log: Path, line: str, *, rank: int | None) -> str | None:
    """The part of a log's line to show for a rank, or for any rank if `rank` is None; None for nothing.

    The label of a single rank is removed. Slurm's log also contains lines of the supervisor.
    """
    if not is_shared(log):
        return line
    if rank is None:
        return line if _LABEL.match(line) or log.name.startswith("node-") else None
    label = label_of(rank)
    return line.removeprefix(label) if line.startswith(label) else None


def tail_of(attempt: AttemptDirectory, rank: int, lines: int) -> list[str]:
    """The last lines of a rank; [] if it has written none."""
    log = find_log(attempt, rank)
    if log == attempt.log_file(rank):
        return tail_text(log, lines)
    every = (line_of(log, line, rank=rank) for line in tail_text(log, SEARCHED_BYTES, limit_bytes=SEARCHED_BYTES))
    return [line for line in every if line is not None][-lines:]

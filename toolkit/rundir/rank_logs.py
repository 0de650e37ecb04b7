"""Where the lines of a rank stand: in a file of its own, or with those of its node where a job has many ranks.

65,536 ranks with a file each would bring a metadata server down. In a file of several ranks each line begins with its
rank, `[17] loss 0.3`; so it does in Slurm's log of a task that is done, which has taken in the logs of its ranks.
"""

from __future__ import annotations

import re
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json_or_none, tail_text
from toolkit.rundir.layout import AttemptDirectory

MOST_FILES = 64  # ranks with a log each
SEARCHED_BYTES = 1 << 20  # of a node's log, for the last lines of one rank
_LABEL = re.compile(r"\[(\d+)\] ", re.ASCII)


def log_of(attempt: AttemptDirectory, rank: int, *, ranks: int, host: str) -> Path:
    """The file that a rank on `host`, one of `ranks`, writes to."""
    return attempt.log_file(rank) if ranks <= MOST_FILES else attempt.node_log(host)


def label_of(rank: int) -> str:
    """What stands before each line of a rank in a file of several ranks."""
    return f"[{rank}] "


def is_shared(log: Path) -> bool:
    """True where each line begins with its rank."""
    return not log.name.startswith("rank-")


def labelled_rank(line: str) -> int | None:
    """The rank that a line of a file of several ranks is of; None where the supervisor speaks."""
    match = _LABEL.match(line)
    return int(match[1]) if match else None


def node_logs(attempt: AttemptDirectory) -> list[Path]:
    """The logs of an attempt's nodes; [] where each rank has its own."""
    return sorted(attempt.logs.glob("node-*.log"))


def find_log(attempt: AttemptDirectory, rank: int) -> Path:
    """The log with a rank's lines; the name of its own where there is none."""
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
    """What a line of a log shows of a rank, or of any where that is None; None for nothing.

    The label of one rank is omitted. Slurm's log also contains the supervisor's lines.
    """
    if not is_shared(log):
        return line
    if rank is None:
        return line if _LABEL.match(line) or log.name.startswith("node-") else None
    label = label_of(rank)
    return line.removeprefix(label) if line.startswith(label) else None


def tail_of(attempt: AttemptDirectory, rank: int, lines: int) -> list[str]:
    """The last lines of a rank; [] where it has written none."""
    log = find_log(attempt, rank)
    if log == attempt.log_file(rank):
        return tail_text(log, lines)
    every = (line_of(log, line, rank=rank) for line in tail_text(log, SEARCHED_BYTES, limit_bytes=SEARCHED_BYTES))
    return [line for line in every if line is not None][-lines:]

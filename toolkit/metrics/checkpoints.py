"""`metrics/checkpoints.jsonl`: a line for each save, also for one that failed, written by rank 0.

Attempts append, and every line counts: a save that a later attempt has gone back over cost its time all the same.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path

from toolkit.metrics.records import RecordLog, read_records

# Why a save was made; where several reasons came together, the first of them.
REASONS = ("stop", "end", "best", "health", "asked", "every_steps", "every_s")
CENTURY_S = 3.2e9  # nothing in a run takes as long


@dataclass(frozen=True)
class SaveRecord:
    """One save. The fields are the columns of the file, in this order.

    step: optimizer steps done.
    why: one of `REASONS`.
    waited_s: seconds for which rank 0 took no steps; of a save in the background, the wait for the one before it and
        for the copy.
    committed_s: seconds from its begin until the checkpoint was committed; null where the save failed.
    bytes: of all files of the checkpoint; null where the save failed.
    error: why it failed; null where it did not.
    metric: what `checkpoint.best` names, null where it was not measured at this step or is not finite.
    time: when it ended, UTC, ISO 8601.
    attempt: the attempt that saved.
    """

    step: int
    why: str
    waited_s: float
    committed_s: float | None
    bytes: int | None
    error: str | None
    metric: float | None
    time: str
    attempt: int

    def to_line(self) -> str:
        row = asdict(self)
        row["metric"] = self.metric if self.metric is not None and math.isfinite(self.metric) else None
        return json.dumps(row, allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> SaveRecord:
        row = json.loads(line)
        for field in fields(cls):
            if not _fits(row[field.name], str(field.type)):
                raise ValueError(f"{field.name} is {row[field.name]!r:.40}")
        record = cls(**{field.name: row[field.name] for field in fields(cls)})
        seconds_since_epoch(record.time)
        if not 0 <= record.waited_s < CENTURY_S:
            raise ValueError(f"waited_s is {record.waited_s}")
        return record

    @property
    def ended_at(self) -> float:
        """When it ended, in seconds since the epoch."""
        return seconds_since_epoch(self.time)

    @property
    def began_at(self) -> float:
        """When steps stopped for it; of a failed one in the background, which does not tell, some time later."""
        return self.ended_at - (self.waited_s if self.committed_s is None else self.committed_s)

    @property
    def went_on_at(self) -> float:
        """When steps continued."""
        return self.began_at + self.waited_s


def seconds_since_epoch(time: str) -> float:
    """Of an ISO 8601 time.

    Raises:
        ValueError: it is none, or of a year that no computer saw.
    """
    moment = datetime.fromisoformat(time)
    if not 1970 < moment.year < 9000:
        raise ValueError(f"the year is {moment.year}")
    return moment.timestamp()


def _fits(value: object, kind: str) -> bool:
    """True for a value of the annotation `kind`, as JSON has it."""
    if value is None:
        return kind.endswith("None")
    if isinstance(value, str):
        return kind.startswith("str")
    if type(value) is int:
        return abs(value) < 2**63 and kind.startswith(("int", "float"))
    return isinstance(value, float) and math.isfinite(value) and kind.startswith("float")


class SaveLog(RecordLog[SaveRecord]):
    """Appends to the file."""


def read_save_log(path: Path) -> list[SaveRecord]:
    """All saves of the run in the order of the file; none where there is no file yet.

    Raises:
        ToolkitError: for a finished line that is not a record, naming file and line.
    """
    try:
        return list(read_records(path, SaveRecord.from_line, what="save"))
    except FileNotFoundError:
        return []

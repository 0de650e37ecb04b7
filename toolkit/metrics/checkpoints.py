"""`metrics/checkpoints.jsonl`: a line for each save, including failed ones, written by rank 0.

Every attempt appends its lines. All lines count, because a save took its time even if its steps are repeated later.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path

from toolkit.metrics.records import RecordLog, read_records

__all__ = ["CENTURY_S", "SaveLog", "SaveRecord", "read_save_log", "seconds_since_epoch"]

# The reasons for a save; if several apply, the first one is recorded.
REASONS = ("stop", "end", "best", "health", "asked", "every_steps", "every_s")
CENTURY_S = 3.2e9  # upper limit of plausible durations


@dataclass(frozen=True)
class SaveRecord:
    """One save. The fields are the columns of the file, in this order.

    step: optimizer steps performed.
    why: one of `REASONS`.
    waited_s: seconds without steps on rank 0; for a background save, the wait for the previous save and for the copy.
    committed_s: seconds from the start of the save to its commit; null if it failed.
    bytes: the size of all files of the checkpoint; null if the save failed.
    error: why the save failed, else null.
    metric: the metric of `checkpoint.best`; null if not measured at this step, or not finite.
    time: when the save ended, UTC, ISO 8601.
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
                raise ValueError(f"unexpected {field.name}: {row[field.name]!r:.40}")
        record = cls(**{field.name: row[field.name] for field in fields(cls)})
        seconds_since_epoch(record.time)
        if not 0 <= record.waited_s < CENTURY_S:
            raise ValueError(f"implausible waited_s: {record.waited_s}")
        return record

    @property
    def ended_at(self) -> float:
        """When the save ended, in seconds since the epoch."""
        return seconds_since_epoch(self.time)

    @property
    def began_at(self) -> float:
        """When steps stopped for the save; too late for a failed background save, whose record lacks this time."""
        return self.ended_at - (self.waited_s if self.committed_s is None else self.committed_s)

    @property
    def went_on_at(self) -> float:
        """When steps continued."""
        return self.began_at + self.waited_s


def seconds_since_epoch(time: str) -> float:
    """Convert an ISO 8601 time.

    Raises:
        ValueError: the string is not a time, or out of range.
    """
    moment = datetime.fromisoformat(time)
    if not 1970 < moment.year < 9000:
        raise ValueError(f"implausible timestamp: the year is {moment.year}")
    return moment.timestamp()


def _fits(value: object, kind: str) -> bool:
    """Return True if a JSON value has a type that the annotation `kind` allows."""
    if value is None:
        return kind.endswith("None")
    if isinstance(value, str):
        return kind.startswith("str")
    if type(value) is int:
        return abs(value) < 2**63 and kind.startswith(("int", "float"))
    return isinstance(value, float) and math.isfinite(value) and kind.startswith("float")


class SaveLog(RecordLog[SaveRecord]):
    """Appends to `checkpoints.jsonl`."""


def read_save_log(path: Path) -> list[SaveRecord]:
    """Return all saves of the run in file order; [] if there is no file.

    Raises:
        ToolkitError: a complete line is not a record; the error names file and line.
    """
    try:
        return list(read_records(path, SaveRecord.from_line, what="save"))
    except FileNotFoundError:
        return []

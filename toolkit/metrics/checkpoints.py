"""`metrics/checkpoints.jsonl`: a line for each save, also for one that failed, written by rank 0.

Attempts append, and every line counts: a save that a later attempt has gone back over cost its time all the same.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from toolkit.metrics.records import RecordLog, read_records

# Why a save was made; where several reasons came together, the first of them.
REASONS = ("stop", "end", "best", "health", "asked", "every_steps", "every_s")


@dataclass(frozen=True)
class SaveRecord:
    """One save. The fields are the columns of the file, in this order.

    step: optimizer steps done.
    why: one of `REASONS`.
    waited_s: seconds for which rank 0 took no steps.
    committed_s: seconds until the checkpoint was committed; null where the save failed.
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
        record = cls(**{field.name: row[field.name] for field in fields(cls)})
        for name in ("step", "attempt"):
            if type(row[name]) is not int:
                raise ValueError(f"{name} is {row[name]!r}")
        if not isinstance(record.waited_s, (int, float)) or not isinstance(record.time, str):
            raise ValueError("waited_s is no number, or time is no text")
        return record


class SaveLog(RecordLog[SaveRecord]):
    """Appends to the file."""


def read_save_log(path: Path) -> list[SaveRecord]:
    """All saves of the run in the order of the file; none where there is no file yet.

    Raises:
        ToolkitError: for a finished line that is no record, naming file and line.
    """
    try:
        return list(read_records(path, SaveRecord.from_line, what="save"))
    except FileNotFoundError:
        return []

"""`metrics/validation.jsonl`: a line for each validation, written by rank 0. Standard library only."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from toolkit.metrics.records import RecordLog, read_records


@dataclass(frozen=True)
class ValidationRecord:
    """One validation. The fields are the columns of the file, in this order.

    step: optimizer steps taken when it was made.
    samples: that were validated with, over all ranks; each counts once.
    means: of each measurement by its name; null in the file where it is not finite.
    average: whether the weights were those of the moving average.
    time: when it ended, UTC, ISO 8601.
    attempt: the attempt that made it.
    """

    step: int
    samples: int
    means: dict[str, float]
    average: bool
    time: str
    attempt: int

    def to_line(self) -> str:
        row = asdict(self)
        row["means"] = {name: mean if math.isfinite(mean) else None for name, mean in self.means.items()}
        return json.dumps(row, allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> ValidationRecord:
        row = json.loads(line)
        row["means"] = {name: math.nan if mean is None else float(mean) for name, mean in row["means"].items()}
        return cls(**row)


class ValidationLog(RecordLog[ValidationRecord]):
    """Appends to the file."""


def read_validations(path: Path) -> list[ValidationRecord]:
    """The validations of the run as it stands: a line at step N replaces those from step N on before it.

    Raises:
        ToolkitError: for a finished line that is no record, naming file and line.
    """
    kept: list[ValidationRecord] = []
    for record in read_records(path, ValidationRecord.from_line, what="validation"):
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return kept

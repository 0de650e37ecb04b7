"""`metrics/validation.jsonl`: a line for each validation, written by rank 0. Standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.metrics.records import RecordLog, last_of, read_steps

__all__ = ["ValidationLog", "ValidationRecord", "in_words", "last_validation", "read_validations"]


@dataclass(frozen=True)
class ValidationRecord:
    """One validation. The fields are the columns of the file, in this order.

    step: optimizer steps before this validation.
    samples: validation samples over all ranks; each counts once.
    means: the mean of each measurement by name; null in the file if not finite.
    average: whether the validated weights were the moving average.
    time: when the validation ended, UTC, ISO 8601.
    attempt: the attempt of this validation.
    stopped: why early stopping ended the run after this validation, else "".
    """

    step: int
    samples: int
    means: dict[str, float]
    average: bool
    time: str
    attempt: int
    stopped: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        means = {name: mean if math.isfinite(mean) else None for name, mean in self.means.items()}
        return asdict(self) | {"means": means}

    def to_line(self) -> str:
        return json.dumps(self.as_json(), allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> ValidationRecord:
        row = json.loads(line)
        row["means"] = {name: math.nan if mean is None else float(mean) for name, mean in row["means"].items()}
        return cls(**row)


class ValidationLog(RecordLog[ValidationRecord]):
    """Appends to `validation.jsonl`."""


def read_validations(path: Path) -> list[ValidationRecord]:
    """Return the current validations of the run (`read_steps`)."""
    return read_steps(path, ValidationRecord.from_line, what="validation")


def last_validation(path: Path) -> ValidationRecord | None:
    """Return the newest record, or None if there is none."""
    return last_of(path, ValidationRecord.from_line)


def in_words(means: Mapping[str, float]) -> str:
    """Format the measurements, as "loss 1.2345, accuracy 0.9812"."""
    return ", ".join(f"{name} {mean:.4f}" for name, mean in means.items())

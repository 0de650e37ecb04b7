"""`metrics/train.jsonl`: a line every `train.log_every` optimizer steps, written by rank 0. Standard library only.

A resumed attempt appends. If it repeats steps of an earlier attempt, its lines replace theirs when the file is read.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from toolkit.metrics.records import RecordLog, last_of, read_steps

__all__ = ["TrainLog", "TrainRecord", "last_record", "read_train_log"]


@dataclass(frozen=True)
class TrainRecord:
    """One optimizer step. The fields are the columns of the file, in this order.

    step: optimizer steps since the start of the run, including this one; the first line has 1.
    steps: the last step of the run.
    loss: mean over the global batch; null in the file if not finite.
    loss_hex: the same number as a C99 hexadecimal float, exact to the last bit.
    lr: the learning rate of this step.
    grad_norm: 2-norm of the gradient before clipping; null in the file if not finite.
    samples, tokens: the number read by all ranks since the start of the run.
    seconds: wall-clock time per step on rank 0, mean since the previous line or save.
    tokens_per_s: tokens per step over all ranks, divided by `seconds`.
    time: when the step ended, UTC, ISO 8601.
    attempt: the attempt of this step.
    world: the number of ranks of the attempt.
    flops_per_s: model FLOPs per rank and second, if counted.
    mfu: `flops_per_s` as a fraction of the GPU's peak, if known.
    """

    step: int
    steps: int
    loss: float
    loss_hex: str
    lr: float
    grad_norm: float
    samples: int
    tokens: int
    seconds: float
    tokens_per_s: float
    time: str
    attempt: int
    world: int
    flops_per_s: float | None = None
    mfu: float | None = None

    def to_line(self) -> str:
        row = asdict(self)
        for name in ("loss", "grad_norm"):
            row[name] = row[name] if math.isfinite(row[name]) else None  # JSON has no NaN
        return json.dumps(row, allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> TrainRecord:
        row = json.loads(line)
        for name in ("step", "steps", "attempt"):
            if type(row[name]) is not int:
                raise ValueError(f"expected an integer {name}, got {row[name]!r}")
        row["loss"] = float.fromhex(row["loss_hex"])
        row["grad_norm"] = math.nan if row["grad_norm"] is None else row["grad_norm"]
        return cls(**row)


class TrainLog(RecordLog[TrainRecord]):
    """Appends to `train.jsonl`."""


def read_train_log(path: Path) -> list[TrainRecord]:
    """Return the current steps of the run (`read_steps`), even while a writer is active."""
    return read_steps(path, TrainRecord.from_line, what="training")


def last_record(path: Path) -> TrainRecord | None:
    """Return the newest record, or None if there is none."""
    return last_of(path, TrainRecord.from_line)

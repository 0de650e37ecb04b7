"""The metrics of a run, wherever they are from: `train.jsonl` of toolkit's loop, and those of the program itself.

Standard library only.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from toolkit.metrics.own import FILES, OwnRecord, as_number, last_own, read_own
from toolkit.metrics.record_search import samples_of
from toolkit.metrics.training import TrainRecord, last_record
from toolkit.metrics.windows import LOSS
from toolkit.rundir.files import tail_text

__all__ = [
    "SCALARS", "Newest", "in_words", "losses_of", "metrics_as_json", "newest_metrics", "own_name", "rate_of", "recent_records", "scalars_of",
    "with_own",
]  # fmt: skip

SCALARS = ("loss", "lr", "grad_norm", "tokens_per_s", "seconds", "mfu")  # of `train.jsonl`
_SHOWN = 4
_COLUMNS = frozenset(one.name for one in fields(TrainRecord))


@dataclass(frozen=True)
class Newest:
    """The newest values of a run, and the step and attempt of the last one; `steps` is the last step of the run, if known."""

    step: int
    attempt: int
    steps: int | None
    values: Mapping[str, float]

    @property
    def loss(self) -> float | None:
        return self.values.get(LOSS)

    def __str__(self) -> str:
        steps = "" if self.steps is None else f"/{self.steps}"
        return f"step {self.step}{steps}" + ("" if self.loss is None else f", loss {self.loss:.4g}")


def newest_metrics(folder: Path) -> Newest | None:
    """Return the newest values of a run, from the ends of its files; None if there are none."""
    train, own = last_record(folder / "train.jsonl"), last_own(folder)
    if train is None:
        return None if own is None else Newest(own.step, own.attempt, None, own.values)
    return Newest(train.step, train.attempt, train.steps, {LOSS: train.loss} | (own.values if own is not None else {}))


def recent_records(folder: Path, count: int) -> Sequence[TrainRecord | OwnRecord]:
    """Return the last records of toolkit's loop, else those of the program itself."""
    for name, kind in (("train.jsonl", TrainRecord), (FILES[0], OwnRecord)):
        found: list[TrainRecord | OwnRecord] = []
        for line in tail_text(folder / name, count):
            with suppress(ValueError, KeyError, TypeError):  # the first or last line may be incomplete
                found.append(kind.from_line(line))
        if found:
            return found
    return []


def losses_of(folder: Path, count: int) -> list[float]:
    """Return at most `count` samples of the loss, over the whole run."""
    losses = [one.loss for one in samples_of(folder / "train.jsonl", TrainRecord.from_line, count)]
    for path in (folder / name for name in FILES):
        own = samples_of(path, OwnRecord.from_line, count) if not losses else []
        losses += [one.values[LOSS] for one in own if LOSS in one.values]
    return losses


def with_own(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of `train.jsonl` with the values of the program itself, and rows of their steps that have none."""
    all_rows = [dict(row) for row in rows]
    by_step = {row["step"]: row for row in all_rows}
    taken = _COLUMNS if rows else frozenset(("step", "time", "attempt", "run_id"))
    for name, points in (own := read_own(folder)).items():
        for one in points:
            if (row := by_step.get(one.step)) is None:
                row = by_step[one.step] = {"step": one.step, "time": one.time, "attempt": one.attempt}
                all_rows.append(row)
            row[own_name(name, taken)] = one.value
    return sorted(all_rows, key=lambda row: (row["attempt"], row["step"])) if own else all_rows


def own_name(name: str, taken: Collection[str]) -> str:
    """Return the name of a metric of the program beside other columns; `own.NAME` if one of them has this name."""
    return f"own.{name}" if name in taken else name


def scalars_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics in a row of `with_own`."""
    others = _COLUMNS.difference(SCALARS) if "loss_hex" in row else ("step", "time", "attempt")
    return [name for name, value in row.items() if name not in others and value is not None]


def rate_of(records: Sequence[TrainRecord | OwnRecord]) -> float | None:
    """Return the steps per second over records of one attempt; None if a single one does not show it."""
    first, last = records[0], records[-1]
    seconds = (datetime.fromisoformat(last.time) - datetime.fromisoformat(first.time)).total_seconds()
    if seconds > 0 < last.step - first.step:
        return (last.step - first.step) / seconds
    return 1 / max(last.seconds, 1e-9) if isinstance(last, TrainRecord) else None


def in_words(values: Mapping[str, float]) -> str:
    """Format the loss and at most three other metrics, as "loss 2.31, val_acc 0.91"."""
    names = sorted(values, key=lambda name: name != LOSS)
    return ", ".join(f"{name} {values[name]:.4g}" for name in names[:_SHOWN])


def metrics_as_json(values: Mapping[str, float]) -> dict[str, Any]:
    """Return `loss`, null if there is none or it is not finite, and `metrics` of the JSON of a run."""
    loss = values.get(LOSS, math.nan)
    shown = {name: as_number(value) for name, value in values.items()}
    return {"loss": loss if math.isfinite(loss) else None, "metrics": shown}

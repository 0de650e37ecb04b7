"""The new metrics of a run, as rows of scalars, from the files in its folder `metrics/`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from toolkit.metrics.own import FILES, OwnRecord
from toolkit.metrics.records import RecordTail
from toolkit.metrics.run_metrics import SCALARS
from toolkit.metrics.training import TrainRecord
from toolkit.metrics.validation import ValidationRecord
from toolkit.rundir.files import read_json_or_none, write_json

__all__ = ["Row", "Unsent"]


@dataclass(frozen=True)
class Row:
    """The values of one step; `time_s` is in seconds since the epoch."""

    step: int
    time_s: float
    values: dict[str, float]


def _row_of_training(record: TrainRecord) -> Row:
    values = {f"train/{name}": getattr(record, name) for name in SCALARS}
    return _row(record, {name: value for name, value in values.items() if value is not None})


def _row_of_validation(record: ValidationRecord) -> Row:
    return _row(record, {f"validation/{name}": mean for name, mean in record.means.items()})


def _row(record: Any, values: dict[str, float]) -> Row:
    return Row(record.step, datetime.fromisoformat(record.time).timestamp(), values)


def _rows_of_own(record: OwnRecord) -> list[Row]:
    """Return the new values of a line, a row for each of their steps."""
    steps = sorted({step for name in record.values if (step := record.step_of(name)) >= record.first})
    values = {
        step: {f"train/{name}": one for name, one in record.values.items() if record.step_of(name) == step}
        for step in steps
    }
    return [_row(replace(record, step=step), found) for step, found in values.items()]


_SOURCES: dict[str, Callable[[str], list[Row]]] = {
    "train.jsonl": lambda line: [_row_of_training(TrainRecord.from_line(line))],
    "validation.jsonl": lambda line: [_row_of_validation(ValidationRecord.from_line(line))],
    **dict.fromkeys(FILES, lambda line: _rows_of_own(OwnRecord.from_line(line))),
}


@dataclass
class Unsent:
    """What one tracker has not received. Its file `state` keeps how far each file was sent, and what the tracker needs."""

    metrics: Path
    state: Path
    kept: dict[str, Any] = field(init=False)
    _tails: dict[str, RecordTail[list[Row]]] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = read_json_or_none(self.state) or {}
        self._rewind()

    def _rewind(self) -> None:
        sent = self.kept.get("sent", {})
        self._tails = {
            name: RecordTail(self.metrics / name, make, sent.get(name, 0)) for name, make in _SOURCES.items()
        }

    def send(self, accept: Callable[[list[Row]], None]) -> int:
        """Pass the new rows to `accept`, and return their number; if it raises an error, the next call passes them again."""
        count = 0
        try:
            for rows in self._new():
                accept(rows)
                count += len(rows)
                self.kept["sent"] = {name: tail.offset for name, tail in self._tails.items()}
                self.keep()
        except BaseException:
            self._rewind()
            raise
        return count

    def keep(self) -> None:
        """Write `kept` to the file."""
        self.state.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.state, self.kept, durable=False)

    def _new(self) -> Iterator[list[Row]]:
        for tail in self._tails.values():
            while lines := tail.new():
                yield [row for rows in lines for row in rows]

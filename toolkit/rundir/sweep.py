"""Reads and writes `sweep.json`: for each task of a sweep, the values that override those of the job file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.rundir.files import read_json_or_none, write_json
from toolkit.rundir.layout import RunDirectory

__all__ = ["Sweep", "Values", "common_values", "in_words", "read_sweep", "values_of_task", "write_sweep"]

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Sweep:
    """The swept `keys`, dotted, in the given order. `tasks[T]` overrides values for task T, for some or all keys."""

    keys: tuple[str, ...]
    tasks: tuple[Values, ...]

    def values_of(self, task: int) -> Values:
        """Return the values of a task; {} for a task that is not in the sweep."""
        return self.tasks[task] if 0 <= task < len(self.tasks) else {}


def write_sweep(run: RunDirectory, sweep: Sweep) -> None:
    """Write `sweep.json`, which must exist before sbatch is called."""
    write_json(run.sweep, {"keys": list(sweep.keys), "tasks": [dict(values) for values in sweep.tasks]})


def read_sweep(run: RunDirectory) -> Sweep | None:
    """Return the sweep of a run, or of the run of a task; None if the run is not a sweep.

    Raises:
        ToolkitError: the file is damaged.
    """
    value = read_json_or_none(run.sweep)
    return Sweep(tuple(value["keys"]), tuple(value["tasks"])) if value is not None else None


def values_of_task(run: RunDirectory) -> Values | None:
    """Return the values that override those of the job file for a sweep task, or None if `run` is not such a task."""
    if run.task_number is None or (sweep := read_sweep(run)) is None:
        return None
    return sweep.values_of(run.task_number)


def in_words(values: Values) -> str:
    """Return the values as text: `train.lr=0.0003, args.layers=4`."""
    return ", ".join(f"{key}={_in_word(value)}" for key, value in values.items())


def _in_word(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def common_values(some: Sequence[Values], others: Sequence[Values]) -> dict[str, Any]:
    """Return the values that all tasks in `some`, but none in `others`, have: a possible cause if `some` failed."""
    if len(some) < 2 or not others:
        return {}
    return {
        key: value
        for key, value in some[0].items()
        if all(key in one and one[key] == value for one in some)
        and not any(key in other and other[key] == value for other in others)
    }

"""The values of a sweep's tasks that override the job's: `sweep.json` contains them once, by task number."""

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
    """`keys` are the swept ones, dotted, in the given order. Task T has `tasks[T]`; for a key that it lacks, the job's value
    applies.
    """

    keys: tuple[str, ...]
    tasks: tuple[Values, ...]

    def values_of(self, task: int) -> Values:
        """The values of a task; {} for a task that is not in the sweep."""
        return self.tasks[task] if 0 <= task < len(self.tasks) else {}


def write_sweep(run: RunDirectory, sweep: Sweep) -> None:
    """Write `sweep.json`; submit does so before it calls sbatch."""
    write_json(run.sweep, {"keys": list(sweep.keys), "tasks": [dict(values) for values in sweep.tasks]})


def read_sweep(run: RunDirectory) -> Sweep | None:
    """The sweep of a run, or of a task's run; None if there is none.

    Raises:
        ToolkitError: the file is damaged.
    """
    value = read_json_or_none(run.sweep)
    return Sweep(tuple(value["keys"]), tuple(value["tasks"])) if value is not None else None


def values_of_task(run: RunDirectory) -> Values | None:
    """The values of a sweep's task that override the job's; None for anything else."""
    if run.task_number is None or (sweep := read_sweep(run)) is None:
        return None
    return sweep.values_of(run.task_number)


def in_words(values: Values) -> str:
    """`train.lr=0.0003, args.layers=4`."""
    return ", ".join(f"{key}={_in_word(value)}" for key, value in values.items())


def _in_word(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def common_values(some: Sequence[Values], others: Sequence[Values]) -> dict[str, Any]:
    """The values that all of `some` tasks have and none of the `others`: a possible cause of their failure."""
    if len(some) < 2 or not others:
        return {}
    return {
        key: value
        for key, value in some[0].items()
        if all(key in one and one[key] == value for one in some)
        and not any(key in other and other[key] == value for other in others)
    }

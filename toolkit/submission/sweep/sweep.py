"""Sweeps: one array whose tasks run the same job with different values, from `--sweep` options and grid files.

Every combination is resolved and checked at submission, so that no task fails on a node with an error that could have
been reported here.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.amend import vary_job
from toolkit.config.argv import SWEPT_ARGUMENT
from toolkit.config.document import Flag
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.config.texts import TABLES
from toolkit.errors import ToolkitError, counted
from toolkit.rundir.sweep import Sweep, in_words
from toolkit.submission.preflight.beginning import check_arguments, check_guard, check_model_folder
from toolkit.submission.sweep.grid import read_grid
from toolkit.submission.sweep.rows import Row, overlap, product, rows_of_option
from toolkit.supervise.launch import is_unmanaged
from toolkit.terminal.talk import say

__all__ = ["ResolvedSweep", "array_of", "read_sweep_options", "resolve_again", "resolve_sweep", "warn_of_unread"]


def read_sweep_options(options: Sequence[str], grid: Path | None) -> list[Row]:
    """Return the tasks of `--sweep KEY=V1,V2` and `--grid FILE` together: the product of all of them; [] for none.

    Raises:
        ToolkitError: a key or a value is invalid, a key is given twice, or there are too many tasks.
        NotFoundError: there is no such file.
    """
    factors: list[list[Row]] = [read_grid(grid)] if grid is not None else []
    factors += [rows_of_option(option) for option in options]
    _refuse_repeated(factors)
    return product(factors, where="--sweep") if factors else []


def _refuse_repeated(factors: Sequence[Sequence[Row]]) -> None:
    seen: dict[str, str] = {}
    for factor in factors:
        keys = {key: flag.name for row in factor for key, flag in row.items()}
        for key, place in keys.items():
            for other, before in seen.items():
                if overlap(key, other):
                    raise ToolkitError(
                        f"{key} is swept twice, first by {before}", where=place, fix="list its values in one place"
                    )
        seen |= keys


# Tables that toolkit passes only to an entry of the form `file.py:function`.
_FOR_FUNCTIONS = frozenset({"args", "train", "data", "parallel"})


def warn_of_unread(job: ResolvedJob, rows: Sequence[Row]) -> None:
    """Warn about swept keys that a script or program does not receive, because all of its tasks would be the same."""
    if not is_unmanaged(job.job.entry):
        return
    places = {key: flag.name for row in reversed(rows) for key, flag in row.items()}
    for key, place in sorted(places.items()):
        table, _, name = key.partition(".")
        if table in _FOR_FUNCTIONS:
            say(
                f"warning: {place}: the entry is not a `file.py:function`, so its tasks receive {key} only in the file that "
                f"TOOLKIT_RESOLVED_JOB names. Fix: sweep an argument or a variable instead, argv.{name} or "
                f"env.vars.{name.upper().replace('.', '_')}"
            )


def array_of(rows: Sequence[Row], asked: str | None) -> str:
    """Return the array of a sweep: all of its tasks, or those that -a names; `%4` alone means all, 4 at a time."""
    everything = f"0-{len(rows) - 1}" if len(rows) > 1 else "0"
    if not asked or asked.startswith("%"):
        return everything + (asked or "")
    return asked


@dataclass(frozen=True)
class ResolvedSweep:
    """A checked sweep. `task_overrides` has the swept and the derived values that override the job, by task number."""

    sweep: Sweep
    task_overrides: Mapping[str, Mapping[str, Any]]


def resolve_sweep(job: ResolvedJob, site: Site, rows: Sequence[Row]) -> ResolvedSweep:
    """Resolve and check every task of the array.

    Raises:
        ToolkitError: a task is invalid; the error names its number and its values.
    """
    keys = tuple(dict.fromkeys(key for row in rows for key in row))
    sweep = Sweep(keys, tuple(_json_of(row) for row in rows))
    return ResolvedSweep(sweep, _laid_over(job, site, rows, sweep))


def resolve_again(job: ResolvedJob, site: Site, sweep: Sweep) -> ResolvedSweep:
    """Resolve a recorded sweep again, because a resume may have changed its job.

    Raises:
        ToolkitError: a task is invalid, or a swept key was set for all tasks, which would have no effect.
    """
    for key in sweep.keys:
        if (origin := job.origin(key)).detail.startswith("--set "):
            raise ToolkitError(
                f"{key} is swept, and each task has its own value", where=origin.detail,
                fix=f"omit {key}, or submit a separate run with this value",
            )  # fmt: skip
    rows = [
        {key: Flag(value, f"sweep.json: {in_words({key: value})}") for key, value in one.items()} for one in sweep.tasks
    ]
    return ResolvedSweep(sweep, _laid_over(job, site, rows, sweep))


def _laid_over(job: ResolvedJob, site: Site, rows: Sequence[Row], sweep: Sweep) -> dict[str, dict[str, Any]]:
    numbers = list(job.job.tasks or ())
    _check_numbers(job, numbers, len(rows))
    base = _tables_of(job, TABLES)
    task_overrides: dict[str, dict[str, Any]] = {}
    resolved = vary_job(job, site, [rows[number] for number in numbers])
    for number in numbers:
        try:
            task = next(resolved)
            check_arguments(task)
            check_model_folder(task)
            check_guard(task)
        except ToolkitError as error:
            for one in (error, *error.others):
                one.where = f"task {number} ({in_words(sweep.tasks[number])}): {one.where}"
            raise
        touched = {key.partition(".")[0] for key in rows[number]} & set(TABLES)
        task_overrides[str(number)] = {
            key: value for key, value in _tables_of(task, touched).items() if base.get(key) != value
        }
        if any(key.startswith(SWEPT_ARGUMENT) for key in rows[number]):
            task_overrides[str(number)] |= {"job.argv": task.job.argv, "argv": task.argv}
    return task_overrides


def _tables_of(job: ResolvedJob, tables: Iterable[str]) -> dict[str, Any]:
    """Return the values of some tables by `table.key`, in their JSON form."""
    dumped = job.model_dump(mode="json", by_alias=True, include=set(tables))
    return {f"{table}.{key}": value for table, keys in dumped.items() for key, value in keys.items()}


def _json_of(row: Row) -> dict[str, Any]:
    """Return the values of a row in their JSON form: TOML dates become strings, as in [args]."""
    return {
        key: flag.value
        if isinstance(flag.value, str | int | float)
        else json.loads(json.dumps(flag.value, default=str))
        for key, flag in row.items()
    }


def _check_numbers(job: ResolvedJob, numbers: Sequence[int], tasks: int) -> None:
    beyond = next((number for number in numbers if number >= tasks), None)
    if beyond is not None:
        raise ToolkitError(
            f"the sweep has {counted(tasks, 'task')}, numbered from 0, but {job.job.array} contains task {beyond}",
            where=job.origin("job.array").place("job.array"),
            fix=f"use task numbers from 0 to {tasks - 1}",
        )

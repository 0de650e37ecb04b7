"""Provide the public Python API: `toolkit.submit`, `toolkit.run`, `toolkit.resume` and `toolkit.list_runs`."""

from __future__ import annotations

import difflib
import json
import math
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from toolkit.errors import ToolkitError
from toolkit.rundir.states import RunState
from toolkit.submission.run_handle import Run

if TYPE_CHECKING:
    from toolkit.config.request import JobRequest

__all__ = ["JobOptions", "list_runs", "nearest_name", "request_of", "resume", "run", "submit"]


class JobOptions(TypedDict, total=False):
    """The options of submit, run and resume; those up to `exclude` are keys of [job] in the job file.

    `run` does not accept `sweep`, `grid` and `after`; `resume` does not accept `sweep` and `grid`.

    `n` is the total number of ranks. An integer `time` is in minutes. `set` overrides any key: {"train.steps": 500}.
    `args` are the arguments of the job. `sweep` maps each swept key to its values, `grid` is a file of values. `after`
    are runs that must end first. `sbatch` has sbatch options for this submission only. `runs` is the folder of all runs.
    """

    name: str
    nodes: int | str
    time: int | str
    array: str
    repeat: int
    account: str
    partition: str
    qos: str
    cluster: str
    ranks_per_node: int
    cpus_per_rank: int
    gpus_per_node: int
    constraint: str
    nodelist: str
    exclude: str
    n: int
    set: Mapping[str, Any]
    args: Sequence[str]
    site: str
    runs: str | Path
    sweep: Mapping[str, Sequence[Any]]
    grid: str | Path
    after: Run | str | Sequence[Run | str]
    sbatch: Sequence[str]


# The options that are not keys of [job]: (description of a valid value, function that checks a value).
_OF_REQUEST: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "n": ("a number of ranks", lambda value: isinstance(value, int)),
    "set": ("a dictionary of keys and values", lambda value: _is_mapping(value)),
    "args": ("a list of arguments", lambda value: _is_list(value)),
    "site": ("the name or file of a site", lambda value: isinstance(value, str | Path)),
    "runs": ("the path of a folder", lambda value: isinstance(value, str | Path)),
    "sweep": ("a dictionary of keys and lists of values", lambda value: _is_mapping(value) and all(map(_is_list, value.values()))),
    "grid": ("the path of a grid file", lambda value: isinstance(value, str | Path)),
    "after": ("a run or a list of runs", lambda value: isinstance(value, str | Run) or _is_list(value)),
    "sbatch": ("a list of sbatch options", lambda value: _is_list(value) and all(isinstance(one, str) for one in value)),
}  # fmt: skip


def submit(job: str | Path, *, force: bool = False, **options: Unpack[JobOptions]) -> Run:
    """Submit a job file or a shipped job, and return its run; a site without a scheduler runs it in the background."""
    from toolkit.submission.create import create

    return create(request_of(job, options), force=force)


def run(job: str | Path, **options: Unpack[JobOptions]) -> Run:
    """Run a job in the foreground, in this process's allocation or on this machine; return its run when it has ended.

    Ctrl-C asks the run to save and stop; a second one kills it. Both return the stopped run.
    """
    from toolkit.submission.batch_search import run_start
    from toolkit.submission.run_here import make_here, resolve_here

    if threading.current_thread() is not threading.main_thread():
        raise ToolkitError(
            "toolkit.run handles Ctrl-C, which only the main thread of a program can do", where=str(job),
            fix="call toolkit.submit and Run.wait in other threads",
        )  # fmt: skip
    _require_absent(options, ("sweep", "grid", "after"), f"toolkit.run: {job}")
    request = request_of(job, options)
    resolved = resolve_here(request)
    directory = make_here(request, resolved)
    run_start(directory, resolved, 0, sys.stdout.write, partial(print, file=sys.stderr, flush=True))
    return Run(directory.path)


def resume(
    run_name: Run | str | Path, *, checkpoint: str | None = None, same_code: bool = False, job_gone: bool = False, force: bool = False,
    **options: Unpack[JobOptions],
) -> Run:  # fmt: skip
    """Resume a run from its newest checkpoint, or from `checkpoint`; `options` may change its nodes and ranks."""
    from toolkit.submission import next_start

    _require_absent(options, ("sweep", "grid"), f"toolkit.resume: {_name_of(run_name)}")
    return next_start.resume(
        request_of(_name_of(run_name), options), checkpoint=checkpoint, same_code=same_code, job_gone=job_gone,
        force=force,
    )  # fmt: skip


def list_runs(
    state: str | Collection[str] | None = (), since: str | datetime | None = "", *, job: str = "", runs: str | Path | None = None,
    limit: int = 0,
) -> list[Run]:  # fmt: skip
    """Return the runs, newest first; `since` is an age such as "7d", a date, or a time."""
    from toolkit.runs.history.listing import list_runs as statuses
    from toolkit.runs.named_runs import folders_of_runs

    if limit < 0:
        raise ToolkitError(f"expected a limit of at least 0, got {limit}", where="limit", fix="pass 0 for all runs")
    if not isinstance(state, str | Collection | None):
        raise ToolkitError(
            f"expected a state or a list of states, got {state!r}", where="state", fix='pass a state such as "failed"'
        )
    states = [_state(one) for one in ([state] if isinstance(state, str) else state or ())]
    first = "" if since in ("", None) else f"{_moment(since):%Y%m%d-%H%M%S}"
    folders = folders_of_runs(Path(runs) if runs is not None else None)
    found = statuses(folders, job=job, states=states, since=first, limit=limit)
    return [Run(Path(status.path), cluster=status.cluster) for status in found]


def request_of(job: str | Path, options: JobOptions | Mapping[str, Any], **fields: Any) -> JobRequest:
    """Return the request for a job or run with these options.

    Raises:
        ToolkitError: an option is unknown, or its value has the wrong type.
    """
    from toolkit.config.document import Flag
    from toolkit.config.request import JobRequest

    given: dict[str, Any] = {**options}
    for name in given:
        if name not in JobOptions.__annotations__:
            raise ToolkitError(
                f"unknown option {name!r}", where=str(job), fix=nearest_name(name, JobOptions.__annotations__)
            )
        kind, is_valid = _OF_REQUEST.get(name, ("", lambda _: True))
        if given[name] is not None and not is_valid(given[name]):
            raise ToolkitError(f"expected {kind}, got {given[name]!r}", where=f"{job}: {name}", fix=f"pass {kind}")
    flags = {
        f"job.{name}": Flag(str(value) if name == "time" else value, name)
        for name, value in given.items()
        if name not in _OF_REQUEST and value is not None
    }
    if given.get("repeat") not in (None, 1):  # each repeated job resumes the run, so Slurm must not requeue it
        flags["job.requeue"] = Flag(False, "repeat, so job.requeue =")
    settings = _settings(given.get("set") or {})
    after = given.get("after") or ()
    sweeps = tuple(
        f"{key}={','.join(_as_choice(key, value) for value in values)}"
        for key, values in (given.get("sweep") or {}).items()
    )
    return JobRequest(
        str(job), settings, flags, given.get("n"), tuple(map(str, given["args"])) if "args" in given else None,
        None if given.get("site") is None else str(given["site"]),
        sweeps=sweeps, after=tuple(map(_name_of, [after] if isinstance(after, str | Run) else after)), sbatch_options=tuple(given.get("sbatch") or ()),
        runs=_path(given.get("runs")), grid=_path(given.get("grid")), **fields,
    )  # fmt: skip


def _require_absent(options: JobOptions, names: Sequence[str], where: str) -> None:
    for name in names:
        if options.get(name):
            raise ToolkitError(f"unsupported option {name!r}", where=where, fix="use toolkit.submit, or omit it")


def _name_of(run: Run | str | Path) -> str:
    return str(run.path if isinstance(run, Run) else run)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


def nearest_name(name: str, known: Collection[str]) -> str:
    """Return the fix for an unknown name: the most similar names, or all."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(sorted(known))}"


def _settings(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={_as_setting(value, is_free=key.startswith('args.'))}" for key, value in values.items())


def _as_setting(value: Any, *, is_free: bool = False) -> str:
    """Return a value in the syntax of --set; a string in [args] is quoted, so that it remains a string."""
    if isinstance(value, str) and not is_free:
        return value
    return _as_toml(value)


def _as_choice(key: str, value: Any) -> str:
    """Return one value of a sweep in the syntax of --sweep, in which a comma separates values.

    Raises:
        ToolkitError: the value of a variable needs quotes; variables have the value as it is written, with its quotes.
    """
    from toolkit.submission.sweep.rows import split_values

    is_split = isinstance(value, str) and split_values(value) != [value]
    if key.startswith("env.vars.") and (is_split or value == ""):
        raise ToolkitError(
            f"expected values without commas and surrounding spaces, got {value!r}", where=f"sweep: {key}",
            fix="pass grid, a file of values",
        )  # fmt: skip
    return _as_setting(value, is_free=is_split or not value or key.startswith("args."))


def _as_toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return json.dumps(value)
    if _is_list(value):
        return f"[{', '.join(map(_as_toml, value))}]"
    if _is_mapping(value):
        return f"{{ {', '.join(f'{_as_toml(key)} = {_as_toml(one)}' for key, one in value.items())} }}"
    raise ToolkitError(
        f"expected a value that TOML can represent, got {value!r}", where="set",
        fix="pass numbers, strings, lists or dictionaries; omit a key instead of passing None",
    )  # fmt: skip


def _state(text: Any) -> RunState:
    try:
        return RunState(text)
    except ValueError:
        known = [state.value for state in RunState]
        raise ToolkitError(
            f"{text!r} is not a valid state", where="state", fix=nearest_name(str(text), known)
        ) from None


def _moment(since: str | datetime) -> datetime:
    from toolkit.terminal.ages import read_moment

    found = since.astimezone(UTC) if isinstance(since, datetime) else read_moment(str(since))
    if found is None:
        raise ToolkitError(
            f"expected an age or a date, got {since!r}", where="since", fix='write "12h", "7d" or "2026-11-20"'
        )
    return found

"""The calls of the public Python API: `toolkit.submit`, `toolkit.run`, `toolkit.resume` and `toolkit.list_runs`."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from toolkit.errors import ToolkitError
from toolkit.rundir.states import RunState
from toolkit.submission.run_handle import Run

if TYPE_CHECKING:
    from toolkit.config.request import JobRequest

__all__ = ["JobOptions", "list_runs", "nearest_name", "request_of", "resume", "run", "submit"]


class JobOptions(TypedDict, total=False):
    """The options that submit, run and resume share; the first ones are keys of [job] in the job file.

    `n` is the total number of ranks. An integer `time` is in minutes. `set` overrides any key: {"train.steps": 500}. `args`
    are the job's arguments, `sweep` has the values of each swept key, `after` names runs that must end first, `sbatch` has
    options of sbatch for this submission alone, and `runs` is the folder of all runs.
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
    after: Sequence[str]
    sbatch: Sequence[str]


_OF_REQUEST = ("n", "set", "args", "site", "runs", "sweep", "grid", "after", "sbatch")


def submit(job: str | Path, *, force: bool = False, **options: Unpack[JobOptions]) -> Run:
    """Submit a job file or a shipped job, and return its run; a site without a scheduler runs it in the background."""
    from toolkit.submission.create import create

    return create(request_of(job, options), force=force)


def run(job: str | Path, **options: Unpack[JobOptions]) -> Run:
    """Run a job in the foreground, in the allocation of this process or on this machine, and return the ended run."""
    from toolkit.submission.run_here import follow_here, make_here, resolve_here

    request = request_of(job, options)
    resolved = resolve_here(request)
    directory = make_here(request, resolved)
    follow_here(directory, resolved, 0, sys.stdout.write)
    return Run(directory.path)


def resume(
    run_name: str, *, checkpoint: str | None = None, same_code: bool = False, job_gone: bool = False, force: bool = False,
    **options: Unpack[JobOptions],
) -> Run:  # fmt: skip
    """Submit the next start of a run from its newest checkpoint, or from `checkpoint`, maybe with another shape."""
    from toolkit.submission import next_start

    return next_start.resume(
        request_of(run_name, options), checkpoint=checkpoint, same_code=same_code, job_gone=job_gone, force=force
    )


def list_runs(
    state: str | Collection[str] = (), since: str | datetime = "", *, job: str = "", runs: str | Path | None = None,
    limit: int = 0,
) -> list[Run]:  # fmt: skip
    """Return the runs, newest first; `since` is an age such as "7d", a date, or a time."""
    from toolkit.runs.history.listing import list_runs as statuses
    from toolkit.runs.named_runs import site_runs

    states = [_state(one) for one in ([state] if isinstance(state, str) else state)]
    first = "" if since == "" else f"{_moment(since):%Y%m%d-%H%M%S}"
    folder = site_runs(Path(runs) if runs is not None else None)
    found = statuses(folder, job=job, states=states, since=first, limit=limit)
    return [Run(Path(status.path), cluster=status.cluster) for status in found]


def request_of(job: str | Path, options: JobOptions | Mapping[str, Any], **fields: Any) -> JobRequest:
    """Return the request that a call states.

    Raises:
        ToolkitError: there is no such option, or its value has the wrong form.
    """
    from toolkit.config.document import Flag
    from toolkit.config.request import JobRequest

    given: dict[str, Any] = {**options}
    for name in given:
        if name not in JobOptions.__annotations__:
            raise ToolkitError(
                f"unknown option {name!r}", where=str(job), fix=nearest_name(name, JobOptions.__annotations__)
            )
    flags = {
        f"job.{name}": Flag(str(value) if name == "time" else value, name)
        for name, value in given.items()
        if name not in _OF_REQUEST and value is not None
    }
    if given.get("repeat") not in (None, 1):  # Slurm must not requeue repeated jobs, too
        flags["job.requeue"] = Flag(False, "repeat, so job.requeue =")
    settings = _settings(given.get("set") or {})
    sweeps = tuple(f"{key}={','.join(map(_as_setting, values))}" for key, values in (given.get("sweep") or {}).items())
    return JobRequest(
        str(job), settings, flags, given.get("n"), tuple(map(str, given.get("args") or ())), given.get("site"),
        sweeps=sweeps, after=tuple(given.get("after") or ()), sbatch_options=tuple(given.get("sbatch") or ()),
        runs=_path(given.get("runs")), grid=_path(given.get("grid")), **fields,
    )  # fmt: skip


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


def nearest_name(name: str, known: Collection[str]) -> str:
    """Return the fix for an unknown name: the most similar names, or all."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"write one of {', '.join(sorted(known))}"


def _settings(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={_as_setting(value, is_free=key.startswith('args.'))}" for key, value in values.items())


def _as_setting(value: Any, *, is_free: bool = False) -> str:
    """Return a value as --set takes it; a string of [args] needs quotes, so that it remains a string."""
    if isinstance(value, str) and not is_free:
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ToolkitError(
            f"expected a JSON value, got {type(value).__name__}", where="set", fix="pass numbers, strings or lists"
        ) from error


def _state(text: str) -> RunState:
    try:
        return RunState(text)
    except ValueError:
        known = [state.value for state in RunState]
        raise ToolkitError(f"{text!r} is not a valid state", where="state", fix=nearest_name(text, known)) from None


def _moment(since: str | datetime) -> datetime:
    from toolkit.terminal.ages import read_moment

    found = since.astimezone(UTC) if isinstance(since, datetime) else read_moment(since)
    if found is None:
        raise ToolkitError(
            f"expected an age or a date, got {since!r}", where="since", fix='write "12h", "7d" or "2026-11-20"'
        )
    return found

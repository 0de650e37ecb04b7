"""From what a user types to a run directory: a run id, a Slurm job id in any form, `last`, or a path."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from toolkit.errors import NotFoundError
from toolkit.rundir.claims import read_claim
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import RunDirectory, start_of

_JOB_ID = re.compile(r"(\d+|local-\d+)(?:[._+].*)?")  # also 123.batch, 123_[5-9%2] and 123+1
_TASK = re.compile(r"(?P<run>.+)_(?P<task>\d+)(?:\.\w+)?")


def runs_folder(flag: str | Path | None, environ: Mapping[str, str], site_runs: str = "") -> Path:
    """The folder of all runs: `--runs` > `TOOLKIT_RUNS` > the site's > `./runs`, absolute."""
    chosen = flag or environ.get("TOOLKIT_RUNS") or site_runs or "runs"
    return typed_path(chosen).absolute()


def typed_path(text: str | Path) -> Path:
    """A path as a user types it: `~` is a home folder, and `~name` of nobody a name like any other."""
    return Path(os.path.expanduser(text))  # noqa: PTH111  pathlib's own ends with an error where there is no such user


def iterate_runs(runs: Path) -> Iterator[RunDirectory]:
    """Every run below `runs`, the newest first."""
    found: list[Path] = []
    for job in sorted(runs.iterdir()) if runs.is_dir() else []:
        if job.is_dir():
            found += [path for path in job.iterdir() if (path / "record.json").exists()]
    for path in sorted(found, key=lambda item: item.name, reverse=True):
        yield RunDirectory(path)


def job_ids(run: RunDirectory) -> list[str]:
    """The job ids of a run, each once, the newest last: those that submission recorded and those that claimed."""
    by_start = _submissions(run) + _claims(run)
    if not by_start:  # an array that was given to sbatch by hand: its tasks know its job
        of_tasks = (claim for number in run.task_numbers() for claim in _claims(run.task(number)))
        by_start = [
            (start, array) for start, job in of_tasks for array, of_array, _ in [job.partition("_")] if of_array
        ]
    newest_first = [job for _, job in sorted(by_start, key=lambda item: item[0], reverse=True) if job]
    return list(dict.fromkeys(newest_first))[::-1]


def _submissions(run: RunDirectory) -> list[tuple[int, str]]:
    """The starts that were handed to the scheduler, with their job ids."""
    found = []
    for path in run.path.glob("submitted-*.json"):
        recorded = read_json_or_none(path) or {}
        found.append((start_of(path), str(recorded.get("job_id", ""))))
    return found


def _claims(run: RunDirectory) -> list[tuple[int, str]]:
    claims = ((number, read_claim(run, number)) for number in run.start_numbers())
    return [(number, claim.job_id) for number, claim in claims if claim is not None]


def has_begun(run: RunDirectory) -> bool:
    """True when a run was submitted (or perhaps was: `submitting-*`) or has started; false when it is only rendered."""
    return any(run.path.glob("submitt*-*.json")) or bool(run.start_numbers())


def _task(run: RunDirectory, number: int) -> Path:
    """The folder of a task, which is there once it has begun.

    Raises:
        NotFoundError: the run is no array; to do to all of it what was meant for a task would be worse than nothing.
    """
    if array_in(newest_record(run)):
        return run.task(number).path
    raise NotFoundError(
        f"run {run.run_id} is no array, so it has no task {number}",
        where=str(run.path),
        fix=f"name the run alone, {run.run_id}",
    )


def newest_record(run: RunDirectory) -> Path:
    """The file with the job as it was last submitted: the last resume's, else `record.json`."""
    return max(run.whole.path.glob("resumed-*.json"), default=run.record)


def array_in(record: Path) -> str:
    """`job.array` of `record.json` or `resumed-SSS.json`; "" for what is no array."""
    job = (read_json_or_none(record) or {}).get("job", {}).get("job", {})
    return str(job.get("array", "")) if isinstance(job, dict) else ""


def find_run(run: str, runs: Path) -> Path:
    """The directory of the run that a user named.

    Args:
        run: a run id, `last` (the newest run that was submitted or has started), a Slurm job id such as `123`, `123_4`
            or `123.batch`, or a path. `last_4`, `RUNID_4` and `123_4` are the folder of task 4, which is there once
            the task has begun.
        runs: the folder of all runs.

    Raises:
        NotFoundError: no such run, where the nearest names are given; or a task of a run that is no array.
    """
    candidate = typed_path(run)
    if (candidate / "record.json").exists():
        return candidate.resolve()
    known = list(iterate_runs(runs))
    of_task = _TASK.fullmatch(run)
    if of_task and (entry := _named(of_task["run"], known)) is not None:
        return _task(entry, int(of_task["task"]))
    entry = _named(run, known)
    if entry is None:
        raise _not_found(run, known, runs)
    return entry.path


def _named(name: str, known: Sequence[RunDirectory]) -> RunDirectory | None:
    """The run that a name without a task means; of two with one job id, as two clusters give them, the newer one."""
    if name == "last":
        return next((entry for entry in known if has_begun(entry)), None)
    for entry in known:
        if name in (entry.run_id, f"{entry.job_name}/{entry.run_id}"):
            return entry
    match = _JOB_ID.fullmatch(name)
    return next((entry for entry in known if match and match[1] in job_ids(entry)), None)


def _not_found(name: str, known: Sequence[RunDirectory], runs: Path) -> NotFoundError:
    if name.partition("_")[0] == "last":
        if not known:
            return NotFoundError("there is no run yet", where=str(runs), fix="`toolkit submit JOB`, or give --runs")
        rendered = known[0].run_id
        return NotFoundError(
            f"no run was submitted yet; {rendered} is only rendered",
            where=str(runs),
            fix=f"`toolkit submit JOB`, or name the run: {rendered}",
        )
    near = difflib.get_close_matches(name, [entry.run_id for entry in known], n=3, cutoff=0.5)
    listed = "`toolkit history` lists the runs; --runs names their folder"
    fix = f"did you mean {', '.join(near)}" if near else listed
    return NotFoundError(f"no run {name!r}", where=str(runs), fix=fix)

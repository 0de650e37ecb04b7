"""Finds the run directory that a user names by a run id, a Slurm job id in any form, `last`, or a path."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.claims import all_parts, task_of
from toolkit.rundir.files import read_json_or_none, typed_path
from toolkit.rundir.index import RunName
from toolkit.rundir.jobs import job_ids, start_of_job
from toolkit.rundir.known import KnownRuns, is_over, known_runs
from toolkit.rundir.layout import RunDirectory, start_of
from toolkit.terminal.talk import say

__all__ = [
    "MOST_ALIKE", "MOST_NAMED", "NoRunError", "array_in", "find_run", "has_begun", "has_ended", "home_of", "listed", "newest_record", "parse_run_name",
    "refuse_part", "run_named", "state_on_disk",
]  # fmt: skip


class NoRunError(NotFoundError):
    """There is no run with this name below RUNS, although Slurm may know a job with it."""


_NEAR = 500  # the number of newest runs that are searched for names similar to a mistyped one
MOST_NAMED = 3  # the most runs that a message lists
MOST_ALIKE = 10  # the most runs with the same job id that a message lists; only this list distinguishes them


def listed(runs: Path) -> list[RunName]:
    """Return the names of all folders that may be runs, newest first; does not look into them."""
    names = []
    for job in sorted(entry.name for entry in _entries(runs) if not entry.name.startswith(".") and entry.is_dir()):
        names += [
            RunName(entry.name, job)
            for entry in _entries(runs / job)
            if not entry.name.startswith(".") and entry.is_dir()
        ]
    return sorted(names, key=itemgetter(0), reverse=True)


def run_named(runs: Path, name: RunName) -> RunDirectory:
    """Return the run directory for a name from `listed`."""
    return RunDirectory(runs / name.job_name / name.run_id)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError:
        say(f"skipping the runs in {folder}: it cannot be read")
        return []


PROBE = "site_probe"  # the job of `toolkit site check`, which `last` does not mean


def has_begun(run: RunDirectory) -> bool:
    """Return False if a run is only rendered, True if it has started or may have been submitted (`submitting-*`)."""
    return any(run.path.glob("submitt*-*.json")) or bool(run.start_numbers())


def _task(run: RunDirectory, number: int) -> Path:
    """Return the folder of a task, which exists after the task has started.

    Raises:
        NotFoundError: the run is not an array. The caller must not act on the whole run instead.
    """
    if array_in(newest_record(run)):
        return run.task(number).path
    raise NotFoundError(
        f"run {run.run_id} is not an array run, so it does not have a task {number}",
        where=str(run.path),
        fix=f"use {run.run_id}, without a task number",
    )


def state_on_disk(run: RunDirectory) -> str:
    """Return the final state of a run, "not ended" or "rendered", according to its files. Does not query Slurm."""
    attempt = run.last_attempt()
    end = AttemptRecord.read(attempt) if attempt is not None else None
    if end is not None and end.final:
        return end.state.value
    return "not ended" if has_begun(run) else "rendered"


def newest_record(run: RunDirectory) -> Path:
    """Return the file with the newest job settings: that of the last resume, else `record.json`."""
    return max(run.whole.path.glob("resumed-*.json"), default=run.record)


def array_in(record: Path) -> str:
    """Return the value of `job.array` in `record.json` or `resumed-SSS.json`; "" if the run is not an array."""
    job = (read_json_or_none(record) or {}).get("job", {}).get("job", {})
    return str(job.get("array", "")) if isinstance(job, dict) else ""


def find_run(run: str, runs: Path) -> Path:
    """Return the directory of the run that a user named.

    Args:
        run: a run id or a unique prefix of one, `last` (the newest run that was submitted or has started), a Slurm job id
        in any form, or a path. `last_4`, `RUNID_4` and `123_4` name the folder of task 4, which exists after the task
        has started. `FORMS` lists all forms.
        runs: the folder of all runs.

    Raises:
        NotFoundError: the run does not exist (the fix suggests similar names), or is not an array but a task was named.
        ToolkitError: several run ids have this prefix, or several runs have this job id.
    """
    if (found := _at_path(run)) is not None:
        return found
    name = parse_run_name(run)
    entry = _by_id(name.run, runs) if name is not None else None
    if entry is None:
        with known_runs(runs) as known:
            entry = _named(run, name, known)
            if entry is None:
                raise _not_found(run, name, known, runs)
    if name is None or name.task is None or run in job_ids(entry):  # repeated jobs, 123_1 and 123_2, are not tasks
        return entry.path
    return _task(entry, task_of(all_parts(entry), name.job_id, name.task))


def _at_path(text: str) -> Path | None:
    """Return the folder of a run or task that the user named by its path, or None if there is no such path.

    Raises:
        NotFoundError: the path exists, but is not a run directory.
    """
    if not text:
        return None
    path = typed_path(text)
    run = RunDirectory(path.resolve())
    if run.record.exists():
        return run.path
    if "/" in text and path.exists():
        fix = "pass the folder that contains record.json; `toolkit history --json` prints the path of each run"
        raise NotFoundError("expected a run directory", where=text, fix=fix)
    return None


def _by_id(text: str, runs: Path) -> RunDirectory | None:
    """Return the run with this complete id, found without the index by checking the folder of each job."""
    if not _WHOLE_ID.fullmatch(text):
        return None
    return next((run for run in map(RunDirectory, runs.glob(f"*/{text}")) if run.may_be_run()), None)


def _named(text: str, name: NameParts | None, known: KnownRuns) -> RunDirectory | None:
    """Return the run that a name refers to; for the name of a task, the run of the task.

    Raises:
        ToolkitError: several run ids have this prefix, or several runs have this job id.
    """
    if (entry := known.called(text)) is not None:
        return entry
    if name is None:
        return None
    if name.run == "last":
        return next((entry for entry in known if has_begun(entry) and entry.job_name != PROBE), None)
    return _of_job(name, known) if name.job_id else _of_id(name.run, known)


def _of_job(name: NameParts, known: KnownRuns) -> RunDirectory | None:
    """Return the run with the job that the name states: a number, with or without a cluster (or a site name).

    Raises:
        NoRunError: all runs with this job id are on other clusters.
        ToolkitError: several runs match equally well.
    """
    homes = {entry: home_of(entry, name.job_id) for entry in known.of_job(name.job_id)}
    alike = [entry for entry, (cluster, _) in homes.items() if cluster == name.cluster]
    if not alike and name.cluster:
        alike = [entry for entry, home in homes.items() if home == ("", name.cluster)]
    if alike or not homes:
        return _only(name, {entry: homes[entry] for entry in alike})
    on = f"cluster {name.cluster}" if name.cluster else "a site's own cluster"
    raise NoRunError(
        f"no run on {on} has job {name.job_id}",
        where=str(known.index.runs),
        fix=f"choose the run with this job on another cluster: {_each_alone(homes)}",
    )


def home_of(run: RunDirectory, job_id: str) -> tuple[str, str]:
    """Return (cluster, site) of a job. The cluster is "" for the site's own. A damaged record results in ("", "")."""
    try:
        start = start_of_job(run, job_id)
        resumed = (path for path in run.path.glob("resumed-*.json") if start_of(path) <= start)
        record = max(resumed, key=start_of, default=run.record)
        job = (read_json_or_none(record) or {}).get("job", {})
    except (ToolkitError, PermissionError):  # the run must still be found; the command then reports the damaged file
        return "", ""
    return str(job.get("job", {}).get("cluster", "")), str(job.get("site", {}).get("name", ""))


def _only(name: NameParts, homes: Mapping[RunDirectory, tuple[str, str]]) -> RunDirectory | None:
    """Return the only one of these runs, or None if there are none. A reinstalled cluster reuses job ids: if all runs
    are on one cluster, a single run that has not ended takes precedence.

    Raises:
        ToolkitError: there are several.
    """
    open_ones = [run for run in homes if not has_ended(run)] if len(set(homes.values())) == 1 else []
    if len(homes) < 2 or len(open_ones) == 1:
        return next(iter(open_ones or homes), None)
    job = f"{name.job_id};{name.cluster}" if name.cluster else name.job_id
    raise ToolkitError(f"job {job} belongs to {len(homes)} runs", where=job, fix=f"choose one of {_each_alone(homes)}")


def has_ended(run: RunDirectory) -> bool:
    """Return True if the last start of a run recorded an end, and no later start was submitted."""
    submitted = max(map(start_of, run.path.glob("submitt*-*.json")), default=-1)
    return is_over(run) and submitted <= max(run.start_numbers(), default=-1)


def _each_alone(homes: Mapping[RunDirectory, tuple[str, str]]) -> str:
    """List the ids of runs, each with the cluster or site of its job."""
    descriptions = [f"{run.run_id} ({_in_words(*home)})" for run, home in islice(homes.items(), MOST_ALIKE)]
    return ", ".join(descriptions) + (", ..." if len(homes) > MOST_ALIKE else "")


def _in_words(cluster: str, site: str) -> str:
    return f"cluster {cluster}" if cluster else f"site {site}" if site else "its record is damaged"


def _of_id(prefix: str, known: KnownRuns) -> RunDirectory | None:
    """Return the run with this id, else the only run whose id has this prefix, else None."""
    job, _, run_id = prefix.rpartition("/")
    matches = list(known.with_prefix(run_id, job=job))
    exact = [one for one in matches if one.run_id == run_id]
    if len(matches) > 1 and not exact:
        near = ", ".join(one.run_id for one in matches[:MOST_NAMED]) + (", ..." if len(matches) > MOST_NAMED else "")
        raise ToolkitError(
            f"ambiguous: {len(matches)} run ids have this prefix", where=prefix, fix=f"use a longer prefix: {near}"
        )
    return next(iter(exact or matches), None)


def _not_found(text: str, name: NameParts | None, known: KnownRuns, runs: Path) -> NotFoundError:
    if name is not None and name.run == "last":
        newest = next(iter(known), None)
        if newest is None:
            return NoRunError(
                "no runs found", where=str(runs), fix="`toolkit submit JOB`, or choose another folder with --runs"
            )
        rendered = newest.run_id
        return NotFoundError(
            f"no submitted run found; {rendered} is only rendered",
            where=str(runs),
            fix=f"`toolkit submit JOB`, or use the run id {rendered}",
        )
    near = difflib.get_close_matches(text, [entry.run_id for entry in islice(known, _NEAR)], n=3, cutoff=0.5)
    if near:
        return NoRunError(f"run {text!r} not found", where=str(runs), fix=f"did you mean {', '.join(near)}")
    if name is None:
        return NoRunError(
            f"run {text!r} not found: not a run id, a path or a job id",
            where=str(runs),
            fix=f"{FORMS}; `toolkit history` lists the runs",
        )
    on = f" on cluster {name.cluster}" if name.cluster else ""
    message = f"no run of job {name.job_id}{on} found" if name.job_id else f"run {text!r} not found"
    return NoRunError(message, where=str(runs), fix="`toolkit history` lists the runs; --runs sets their folder")


FORMS = (
    "RUN is `last`, a run id or its prefix (20261120-14), a path, or a job id as Slurm prints it: "
    "123, 123_4 (a task), 123.0 (a step), 123+1, 123_[0-3], 123;cluster; RUN_4 and last_4 are task 4; or the name of a job, for its newest run"
)

# Steps are 123.0, 123.batch etc. squeue prints pending tasks of an array as 123_[5-9%2], and many as 123_[5-9,...].
_JOB_ID = re.compile(
    r"(?P<job>\d+|local-\d+)(?:_(?P<task>\d+)|(?P<part>\+\d+|_\[[\d,:.%-]+\]))?(?P<step>\.\w+)?(?:;(?P<cluster>[\w.-]+))?"
)
# Digits alone are a job id, so the prefix of a run id needs at least the date and the dash.
_RUN_ID = re.compile(r"(?P<run>last|(?:[^/]+/)?\d{8}-[\da-f-]*)(?:_(?P<task>\d+)(?P<step>\.\w+)?)?")

_WHOLE_ID = re.compile(r"\d{8}-\d{6}-[\da-f]{4}")


@dataclass(frozen=True)
class NameParts:
    """The parts of a name that the user typed. `job_id` is set for a job, else `run`; `part` is a suffix, as `.0`."""

    run: str = ""
    job_id: str = ""
    task: int | None = None
    part: str = ""
    cluster: str = ""


def parse_run_name(text: str) -> NameParts | None:
    """Parse a name into its parts; return None if it has none of the valid forms."""
    if match := _JOB_ID.fullmatch(text):
        part = (match["part"] or "") + (match["step"] or "")
        return NameParts(job_id=match["job"], task=_number(match["task"]), part=part, cluster=match["cluster"] or "")
    if match := _RUN_ID.fullmatch(text):
        return NameParts(run=match["run"], task=_number(match["task"]), part=match["step"] or "")
    return None


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def refuse_part(text: str, verb: str) -> None:
    """Reject a name for only a part of a run or task, because `verb` would act on all of it.

    Raises:
        ToolkitError: the name is that of a step, a component, or several tasks of a job.
    """
    name = parse_run_name(text)
    if name is None or not name.part:
        return
    part = {"+": "one component", "_": "some tasks", ".": "one step"}[name.part[0]]
    fix = f"use {text.partition(name.part)[0]}"
    if name.part[0] == "_":
        fix += f", or each task as {name.job_id}_4"
    raise ToolkitError(f"{verb} expects a run or one task, got {part} of a job", where=text, fix=fix)

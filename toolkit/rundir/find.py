"""From what a user types to a run directory: a run id, a Slurm job id in any form, `last`, or a path."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from itertools import islice
from operator import itemgetter
from pathlib import Path

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.index import RunName
from toolkit.rundir.jobs import job_ids, start_of_job
from toolkit.rundir.known import KnownRuns, is_over, known_runs
from toolkit.rundir.layout import RunDirectory, start_of
from toolkit.rundir.parts import all_parts, task_of
from toolkit.rundir.run_names import FORMS, NameParts, parse_run_name


class NoRunError(NotFoundError):
    """RUNS has no run of this name; Slurm may still know the name."""


_NEAR = 500  # the newest runs, among which names like a mistyped one are looked for
MOST_NAMED = 3  # runs that a message names
MOST_ALIKE = 10  # the same of those that one job id means, of which only the list tells


def runs_folder(flag: str | Path | None, environ: Mapping[str, str], site_runs: str = "") -> Path:
    """The folder of all runs: `--runs` > `TOOLKIT_RUNS` > the site's > `./runs`, absolute."""
    chosen = flag or environ.get("TOOLKIT_RUNS") or site_runs or "runs"
    return typed_path(chosen).absolute()


def typed_path(text: str | Path) -> Path:
    """A path as a user types it: `~` is a home folder; `~name` of an unknown user is an ordinary name."""
    return Path(os.path.expanduser(text))  # noqa: PTH111  pathlib's own ends with an error where there is no such user


def listed(runs: Path) -> list[RunName]:
    """What may be runs, the newest first, by the names of folders alone."""
    names = []
    for job in sorted(entry.name for entry in _entries(runs) if not entry.name.startswith(".") and entry.is_dir()):
        names += [
            RunName(entry.name, job)
            for entry in _entries(runs / job)
            if not entry.name.startswith(".") and entry.is_dir()
        ]
    return sorted(names, key=itemgetter(0), reverse=True)


def run_named(runs: Path, name: RunName) -> RunDirectory:
    """The run directory that such a name has."""
    return RunDirectory(runs / name.job_name / name.run_id)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def has_begun(run: RunDirectory) -> bool:
    """True when a run was submitted (or perhaps was: `submitting-*`) or has started; false when it is only rendered."""
    return any(run.path.glob("submitt*-*.json")) or bool(run.start_numbers())


def _task(run: RunDirectory, number: int) -> Path:
    """The folder of a task, which is there once it has begun.

    Raises:
        NotFoundError: the run is not an array; acting on the whole run would exceed the request.
    """
    if array_in(newest_record(run)):
        return run.task(number).path
    raise NotFoundError(
        f"run {run.run_id} is not an array run, so it has no task {number}",
        where=str(run.path),
        fix=f"name the run alone, {run.run_id}",
    )


def state_on_disk(run: RunDirectory) -> str:
    """What the run's own files tell at a glance: how it ended, "not ended" or "rendered"; Slurm is not asked."""
    attempt = run.last_attempt()
    end = AttemptRecord.read(attempt) if attempt is not None else None
    if end is not None and end.final:
        return end.state.value
    return "not ended" if has_begun(run) else "rendered"


def newest_record(run: RunDirectory) -> Path:
    """The file with the job as it was last submitted: the last resume's, else `record.json`."""
    return max(run.whole.path.glob("resumed-*.json"), default=run.record)


def array_in(record: Path) -> str:
    """`job.array` of `record.json` or `resumed-SSS.json`; "" if the run is not an array."""
    job = (read_json_or_none(record) or {}).get("job", {}).get("job", {})
    return str(job.get("array", "")) if isinstance(job, dict) else ""


def find_run(run: str, runs: Path) -> Path:
    """The directory of the run that a user named.

    Args:
        run: a run id or the beginning of one alone, `last` (the newest run that was submitted or has started), a Slurm
            job id in any form, or a path. `last_4`, `RUNID_4` and `123_4` are the folder of task 4, which is there
            once the task has begun; `run_names` has all forms.
        runs: the folder of all runs.

    Raises:
        NotFoundError: no such run, with similar names; or a task of a run that is not an array.
        ToolkitError: several run ids begin so, or several runs have this job id.
    """
    if (found := _at_path(run)) is not None:
        return found
    name = parse_run_name(run)
    with known_runs(runs) as known:
        entry = _named(run, name, known)
        if entry is None:
            raise _not_found(run, name, known, runs)
    if name is None or name.task is None or run in job_ids(entry):  # repeated jobs, 123_1 and 123_2, are not tasks
        return entry.path
    return _task(entry, task_of(all_parts(entry), name.job_id, name.task))


def _at_path(text: str) -> Path | None:
    """The folder of a run, or of a task, that is named by its path.

    Raises:
        NotFoundError: it is the path of something else.
    """
    if not text:
        return None
    path = typed_path(text)
    run = RunDirectory(path.resolve())
    if run.record.exists():
        return run.path
    if "/" in text and path.exists():
        fix = "name the folder that holds record.json; `toolkit history --json` has the path of each run"
        raise NotFoundError("is not a run directory", where=text, fix=fix)
    return None


def _named(text: str, name: NameParts | None, known: KnownRuns) -> RunDirectory | None:
    """The run that a name means, whichever task of it.

    Raises:
        ToolkitError: several run ids begin so, or several runs have this job id.
    """
    if (entry := known.called(text)) is not None:
        return entry
    if name is None:
        return None
    if name.run == "last":
        return next((entry for entry in known if has_begun(entry)), None)
    return _of_job(name, known) if name.job_id else _of_id(name.run, known)


def _of_job(name: NameParts, known: KnownRuns) -> RunDirectory | None:
    """The run whose job is told as the name has it: a number alone, or with its cluster behind it, for which the name of a
    site stands, too.

    Raises:
        NoRunError: all that have the job id are of other clusters.
        ToolkitError: several runs are meant alike.
    """
    homes = {entry: home_of(entry, name.job_id) for entry in known.of_job(name.job_id)}
    alike = [entry for entry, (cluster, _) in homes.items() if cluster == name.cluster]
    if not alike and name.cluster:
        alike = [entry for entry, home in homes.items() if home == ("", name.cluster)]
    if alike or not homes:
        return _only(name, {entry: homes[entry] for entry in alike})
    on = f"cluster {name.cluster}" if name.cluster else "a site's own cluster"
    raise NoRunError(
        f"no run of {on} has job {name.job_id}",
        where=str(known.index.runs),
        fix=f"name the run that has this job on another one: {_each_alone(homes)}",
    )


def home_of(run: RunDirectory, job_id: str) -> tuple[str, str]:
    """The cluster that a job of a run went to, "" for its site's own, and the site; ("", "") where its record is damaged."""
    try:
        start = start_of_job(run, job_id)
        resumed = (path for path in run.path.glob("resumed-*.json") if start_of(path) <= start)
        record = max(resumed, key=start_of, default=run.record)
        job = (read_json_or_none(record) or {}).get("job", {})
    except (ToolkitError, PermissionError):  # the run must be found all the same: what is done to it names the file
        return "", ""
    return str(job.get("job", {}).get("cluster", "")), str(job.get("site", {}).get("name", ""))


def _only(name: NameParts, homes: Mapping[RunDirectory, tuple[str, str]]) -> RunDirectory | None:
    """The one run of these. A cluster that begins anew gives its numbers again: of one site, those that have ended give way
    to the one that has not.

    Raises:
        ToolkitError: there are several.
    """
    open_ones = [run for run in homes if not _has_ended(run)] if len(set(homes.values())) == 1 else []
    if len(homes) < 2 or len(open_ones) == 1:
        return next(iter(open_ones or homes), None)
    job = f"{name.job_id};{name.cluster}" if name.cluster else name.job_id
    raise ToolkitError(
        f"{len(homes)} runs have job {job}", where=job, fix=f"name the one that is meant: {_each_alone(homes)}"
    )


def _has_ended(run: RunDirectory) -> bool:
    """True where its last start said so, and no later one was submitted."""
    submitted = max(map(start_of, run.path.glob("submitt*-*.json")), default=-1)
    return is_over(run) and submitted <= max(run.start_numbers(), default=-1)


def _each_alone(homes: Mapping[RunDirectory, tuple[str, str]]) -> str:
    """Runs by their ids, each with where its job is."""
    told = [f"{run.run_id} ({_in_words(*home)})" for run, home in islice(homes.items(), MOST_ALIKE)]
    return ", ".join(told) + (", ..." if len(homes) > MOST_ALIKE else "")


def _in_words(cluster: str, site: str) -> str:
    return f"cluster {cluster}" if cluster else f"site {site}" if site else "its record is damaged"


def _of_id(beginning: str, known: KnownRuns) -> RunDirectory | None:
    """The run whose id is this, or alone begins so."""
    job, _, beginning = beginning.rpartition("/")
    found = list(known.beginning(beginning, job=job))
    exact = [one for one in found if one.run_id == beginning]
    if len(found) > 1 and not exact:
        near = ", ".join(one.run_id for one in found[:MOST_NAMED]) + (", ..." if len(found) > MOST_NAMED else "")
        raise ToolkitError(f"{len(found)} runs begin so", where=beginning, fix=f"write more of one: {near}")
    return next(iter(exact or found), None)


def _not_found(text: str, name: NameParts | None, known: KnownRuns, runs: Path) -> NotFoundError:
    if name is not None and name.run == "last":
        newest = next(iter(known), None)
        if newest is None:
            return NotFoundError("there is no run yet", where=str(runs), fix="`toolkit submit JOB`, or give --runs")
        rendered = newest.run_id
        return NotFoundError(
            f"no run was submitted yet; {rendered} is only rendered",
            where=str(runs),
            fix=f"`toolkit submit JOB`, or name the run: {rendered}",
        )
    near = difflib.get_close_matches(text, [entry.run_id for entry in islice(known, _NEAR)], n=3, cutoff=0.5)
    if near:
        return NoRunError(f"no run {text!r}", where=str(runs), fix=f"did you mean {', '.join(near)}")
    if name is None:
        return NoRunError(
            f"no run {text!r}, nor a form of one", where=str(runs), fix=f"{FORMS}; `toolkit history` lists them"
        )
    on = f" on cluster {name.cluster}" if name.cluster else ""
    said = f"no run of job {name.job_id}{on}" if name.job_id else f"no run {text!r}"
    return NoRunError(said, where=str(runs), fix="`toolkit history` lists the runs; --runs names their folder")

"""From what a user types to a run directory: a run id, a Slurm job id in any form, `last`, or a path."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from itertools import islice
from operator import itemgetter
from pathlib import Path

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.index import RunName
from toolkit.rundir.jobs import job_ids
from toolkit.rundir.known import KnownRuns, known_runs
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.parts import all_parts, task_of
from toolkit.rundir.run_names import FORMS, NameParts, parse_run_name


class NoRunError(NotFoundError):
    """Below RUNS is no run of this name; Slurm may know the name all the same."""


_NEAR = 500  # the newest runs, among which names like a mistyped one are looked for
MOST_NAMED = 3  # runs that a message names


def runs_folder(flag: str | Path | None, environ: Mapping[str, str], site_runs: str = "") -> Path:
    """The folder of all runs: `--runs` > `TOOLKIT_RUNS` > the site's > `./runs`, absolute."""
    chosen = flag or environ.get("TOOLKIT_RUNS") or site_runs or "runs"
    return typed_path(chosen).absolute()


def typed_path(text: str | Path) -> Path:
    """A path as a user types it: `~` is a home folder, and `~name` of nobody a name like any other."""
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
        NotFoundError: the run is no array; to do to all of it what was meant for a task would be worse than nothing.
    """
    if array_in(newest_record(run)):
        return run.task(number).path
    raise NotFoundError(
        f"run {run.run_id} is no array, so it has no task {number}",
        where=str(run.path),
        fix=f"name the run alone, {run.run_id}",
    )


def state_on_disk(run: RunDirectory) -> str:
    """What the run's own files tell at a glance: how it ended, "not ended" or "rendered"; Slurm is not asked."""
    attempt = run.last_attempt()
    end = read_json_or_none(attempt.exit_file) if attempt is not None else None
    if end is not None and end.get("final"):
        return str(end.get("state", ""))
    return "not ended" if has_begun(run) else "rendered"


def newest_record(run: RunDirectory) -> Path:
    """The file with the job as it was last submitted: the last resume's, else `record.json`."""
    return max(run.whole.path.glob("resumed-*.json"), default=run.record)


def array_in(record: Path) -> str:
    """`job.array` of `record.json` or `resumed-SSS.json`; "" for what is no array."""
    job = (read_json_or_none(record) or {}).get("job", {}).get("job", {})
    return str(job.get("array", "")) if isinstance(job, dict) else ""


def cluster_in(record: Path) -> str:
    """`job.cluster` of `record.json` or `resumed-SSS.json`; "" for a job of its site's own cluster."""
    job = (read_json_or_none(record) or {}).get("job", {}).get("job", {})
    return str(job.get("cluster", "")) if isinstance(job, dict) else ""


def find_run(run: str, runs: Path) -> Path:
    """The directory of the run that a user named.

    Args:
        run: a run id or the beginning of one alone, `last` (the newest run that was submitted or has started), a Slurm
            job id in any form, or a path. `last_4`, `RUNID_4` and `123_4` are the folder of task 4, which is there
            once the task has begun; `run_names` has all forms.
        runs: the folder of all runs.

    Raises:
        NotFoundError: no such run, where the nearest names are given; or a task of a run that is no array.
        ToolkitError: several run ids begin so.
    """
    if (found := _at_path(run)) is not None:
        return found
    name = parse_run_name(run)
    with known_runs(runs) as known:
        entry = _named(run, name, known)
        if entry is None:
            raise _not_found(run, name, known, runs)
    if name is None or name.task is None or run in job_ids(entry):  # jobs in turn, 123_1 and 123_2, are no tasks
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
        raise NotFoundError("is no run directory", where=text, fix=fix)
    return None


def _named(text: str, name: NameParts | None, known: KnownRuns) -> RunDirectory | None:
    """The run that a name means, whichever task of it.

    Raises:
        ToolkitError: several run ids begin so.
    """
    if (entry := known.called(text)) is not None:
        return entry
    if name is None:
        return None
    if name.run == "last":
        return next((entry for entry in known if has_begun(entry)), None)
    return _of_job(name, known) if name.job_id else _of_id(name.run, known)


def _of_job(name: NameParts, known: KnownRuns) -> RunDirectory | None:
    """Of two runs with one job id, as two clusters give them: the one that went to the cluster by its name, then the one of
    a site of that name.

    Raises:
        NoRunError: all that have the job id are of other clusters.
    """
    found = known.of_job(name.job_id)
    if not name.cluster:
        return next(found, None)
    of_clusters = [(cluster_in(newest_record(entry)), entry) for entry in found]
    if (exact := next((entry for cluster, entry in of_clusters if cluster == name.cluster), None)) is not None:
        return exact
    of_sites = [entry for cluster, entry in of_clusters if not cluster and _site_of(entry) == name.cluster]
    if of_sites or not of_clusters:
        return next(iter(of_sites), None)
    others = [
        f"{entry.run_id} ({f'cluster {cluster}' if cluster else f'site {_site_of(entry)}'})"
        for cluster, entry in of_clusters[:MOST_NAMED]
    ]
    raise NoRunError(
        f"no run of cluster {name.cluster} has job {name.job_id}",
        where=str(known.index.runs),
        fix=f"name the run that has this job on another one: {', '.join(others)}",
    )


def _site_of(run: RunDirectory) -> str:
    job = (read_json_or_none(run.record) or {}).get("job", {})
    return str(job.get("site", {}).get("name", ""))


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

"""The job of a run as its record keeps it, and the Slurm that it runs on."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.rundir.files import read_json
from toolkit.rundir.find import newest_record
from toolkit.rundir.layout import RunDirectory, start_of
from toolkit.rundir.run_files import damaged_record
from toolkit.runs.status.unknown_names import vanished
from toolkit.site.commands import slurm_of_site
from toolkit.site.load import load_site
from toolkit.slurm.commands import Slurm


def slurm_of(job: ResolvedJob) -> Slurm:
    """Slurm's commands for the cluster of a job."""
    return slurm_of_site(job.scheduler, cluster=job.job.cluster)


def uses_slurm(job: ResolvedJob) -> bool:
    """False for the site where ranks start on this machine."""
    return job.scheduler.kind == "slurm"


def is_interactive(run: RunDirectory) -> bool:
    """True if the newest start runs in an allocation of the user, which toolkit must not end."""
    return any(read_json(path).get("interactive") for path in sorted(run.path.glob("submitted-*.json"))[-1:])


def recorded_job(run: RunDirectory) -> ResolvedJob:
    """The job of a run as it was last submitted, with every layer applied."""
    try:
        return _job_of_record(newest_record(run))
    except FileNotFoundError:
        raise vanished(run) from None


def jobs_of_starts(run: RunDirectory) -> dict[int, ResolvedJob]:
    """The job of a run as each submission had it, by the first start of each, the first one first."""
    resumed = sorted(run.whole.path.glob("resumed-*.json"), key=start_of)
    try:
        return {0: _job_of_record(run.whole.record)} | {start_of(path): _job_of_record(path) for path in resumed}
    except FileNotFoundError:
        raise vanished(run) from None


def first_job(run: RunDirectory) -> ResolvedJob:
    """The job of a run as it was first submitted: no resume has changed it."""
    return _job_of_record(run.record)


def _job_of_record(path: Path) -> ResolvedJob:
    value: dict[str, Any] = read_json(path)
    try:
        return _validated(json.dumps(value["job"]))
    except ValidationError as error:
        raise damaged_record(path, value) from error


@lru_cache(maxsize=256)
def _validated(text: str) -> ResolvedJob:
    """Many runs have one job, and to check it takes longer than to read all else of a run."""
    return ResolvedJob.model_validate(json.loads(text))


def site_of(recorded: ResolvedJob) -> Site:
    """The site of a recorded job: its file as it was named then (`--site PATH`), else by its name."""
    path = recorded.origin("site.name").detail.rpartition(":")[0]
    return load_site(path if path and Path(path).is_file() else recorded.site.name)


def sbatch_words(job: ResolvedJob) -> list[str]:
    """The options of the site, then those of the job; sbatch takes the last of each."""
    return [*job.scheduler.options, *job.job.sbatch]

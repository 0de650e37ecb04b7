"""Finds the Slurm jobs of a run in its files."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from toolkit.errors import DamagedFileError
from toolkit.rundir.claims import newest_parts, parts_in, read_claim, slurm_id
from toolkit.rundir.files import read_json, read_json_or_none
from toolkit.rundir.layout import RunDirectory, start_of

__all__ = ["job_ids", "newest_job_id", "readable_job_ids"]


def job_ids(run: RunDirectory) -> list[str]:
    """Return the distinct job ids of a run, newest last: those of submissions and those that claimed a start."""
    by_start = _submissions(run) + _claims(run)
    if not by_start:  # the user submitted an array with sbatch, so only the claims of its tasks contain the job id
        of_tasks = (claim for number in run.task_numbers() for claim in _claims(run.task(number)))
        by_start = [
            (start, array) for start, job in of_tasks for array, of_array, _ in [job.partition("_")] if of_array
        ]
    newest_first = [job for _, job in sorted(by_start, key=lambda item: item[0], reverse=True) if job]
    return list(dict.fromkeys(newest_first))[::-1]


def newest_job_id(run: RunDirectory) -> str:
    """Return the Slurm id of the newest job of a run, or of a task within its array job; "" if there is none yet."""
    ids = job_ids(run)
    if run.task_number is None:  # only all repeated jobs together, 123_1 and 123_2, show whether the run continues
        return ids[-1].partition("_")[0] if ids else ""
    return ids[-1] if ids else slurm_id(newest_parts(run), newest_job_id(run.whole), run.task_number)


def readable_job_ids(run: RunDirectory) -> list[str]:
    """Return the job ids of a run as in `job_ids`, but ignoring damaged files."""
    return list(dict.fromkeys(job for _, job in sorted(_readable(run)) if job))


def start_of_job(run: RunDirectory, job_id: str) -> int:
    """Return the newest start that a job has executed or was submitted for; 0 if no file contains the job id."""
    return max((start for start, known in _readable(run) if known == job_id), default=0)


def _readable(run: RunDirectory) -> list[tuple[int, str]]:
    """Return the starts with their job ids, from undamaged files."""
    starts = []
    for path in run.path.glob("submitted-*.json"):
        with suppress(DamagedFileError, OSError):  # another file may contain the job id
            starts += [(start_of(path), job_id) for job_id in _ids_in(read_json(path))]
    for number in run.start_numbers():
        with suppress(DamagedFileError, OSError):
            claim = read_claim(run, number)
            starts += [(number, claim.job_id)] if claim is not None else []
    return starts


def _submissions(run: RunDirectory) -> list[tuple[int, str]]:
    """Return the starts that were submitted to the scheduler, with their job ids."""
    starts = []
    for path in run.path.glob("submitted-*.json"):
        recorded = read_json_or_none(path) or {}
        starts += [(start_of(path), job_id) for job_id in _ids_in(recorded)]
    return starts


def _ids_in(recorded: Mapping[str, Any]) -> list[str]:
    return [part.job_id for part in parts_in(recorded)] or [str(recorded.get("job_id", ""))]


def _claims(run: RunDirectory) -> list[tuple[int, str]]:
    claims = ((number, read_claim(run, number)) for number in run.start_numbers())
    return [(number, claim.job_id) for number, claim in claims if claim is not None]

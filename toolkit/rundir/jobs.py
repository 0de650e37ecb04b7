"""Which Slurm jobs a run was."""

from __future__ import annotations

from toolkit.rundir.claims import read_claim
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import RunDirectory, start_of
from toolkit.rundir.parts import parts_in


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
        ids = [part.job_id for part in parts_in(recorded)] or [str(recorded.get("job_id", ""))]
        found += [(start_of(path), job_id) for job_id in ids]
    return found


def _claims(run: RunDirectory) -> list[tuple[int, str]]:
    claims = ((number, read_claim(run, number)) for number in run.start_numbers())
    return [(number, claim.job_id) for number, claim in claims if claim is not None]

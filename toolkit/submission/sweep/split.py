"""Arrays beyond Slurm's limits: above MaxArraySize they are split into several; more than MaxSubmitJobs are refused.

If an array limits its concurrent tasks (`%10`), each part starts after the previous one has ended, so that the limit
applies to all parts together.
"""

import getpass
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.slurm.array import ArrayTasks, write_array
from toolkit.slurm.associations import associations_of
from toolkit.slurm.commands import Slurm
from toolkit.slurm.limits import cluster_settings
from toolkit.slurm.records import whole_number

__all__ = ["Slice", "fix_of_room", "slices_instead", "slices_of"]


@dataclass(frozen=True)
class Slice:
    """Tasks of a run as one Slurm array: index 0 is task `first`; `last` is the highest task that it can contain."""

    first: int
    last: int
    array: str


def slices_of(tasks: ArrayTasks, size: int | None) -> list[Slice]:
    """Split tasks into arrays with indices below `size`; return [] if a single array is enough."""
    if size is None or max(tasks) < size:
        return []
    limit = f"%{tasks.at_once}" if tasks.at_once else ""
    return [Slice(first, first + size - 1, write_array(numbers) + limit) for first, numbers in _windows(tasks, size)]


def _windows(tasks: ArrayTasks, size: int) -> Iterator[tuple[int, list[int]]]:
    by_window: dict[int, list[int]] = {}
    for task in sorted(tasks):
        by_window.setdefault(task // size, []).append(task % size)
    for window, numbers in by_window.items():
        yield window * size, numbers


def slices_instead(refused: SchedulerRefusedError, job: ResolvedJob, slurm: Slurm) -> list[Slice]:
    """Return the arrays to submit instead of one that Slurm has refused.

    Raises:
        SchedulerRefusedError: splitting does not help: Slurm refused it for another reason, or it has too many tasks.
    """
    if job.job.tasks is not None:
        if "submit limit" in refused.message.lower() or "array spec" in refused.message.lower():
            check_submit_limit(job, slurm)
        if slices := slices_of(job.job.tasks, array_size(slurm)):
            return slices
    raise refused


def array_size(slurm: Slurm) -> int | None:
    """Return MaxArraySize, which task numbers must be below; None if Slurm does not report it."""
    try:
        return whole_number(cluster_settings(slurm).get("MaxArraySize"))
    except (NotFoundError, SchedulerRefusedError):
        return None


def check_submit_limit(job: ResolvedJob, slurm: Slurm) -> None:
    """Refuse more tasks than the user's association allows, because Slurm would accept none of them.

    Raises:
        SchedulerRefusedError: there are too many; the fix names the tasks that fit, and how to submit the others.
    """
    tasks = sorted(job.job.tasks or ())
    limit = _submit_limit(job, slurm)
    if limit is None:
        return
    queued = len(slurm.call(["squeue", "--me", "--noheader", "--array", "--format=%i"]).split())
    room = max(0, limit - queued)
    if len(tasks) <= room:
        return
    raise SchedulerRefusedError(
        f"{len(tasks)} tasks, but you may have at most {limit} jobs in the queue (MaxSubmitJobs), and {queued} are in it "
        "now",
        where=job.origin("job.array").place("job.array"),
        fix=fix_of_room(tasks, room),
    )


def fix_of_room(tasks: Sequence[int], room: int) -> str:
    """Return the fix for submitting all tasks if the queue accepts only `room` of them."""
    if not room:
        return "wait until your jobs have ended"
    now, later = write_array(tasks[:room]), write_array(tasks[room:])
    return (
        f"submit with -a {now}; when these have ended, `toolkit resume RUN --set job.array={later}`. SLURM_ARRAY_TASK_COUNT "
        f"is then {room}: pass {len(tasks)} as an argument to a program that divides its input by it"
    )


def _submit_limit(job: ResolvedJob, slurm: Slurm) -> int | None:
    """Return the lowest MaxSubmitJobs of the user's associations for the account and partition of the job, if any."""
    account, partition = job.job.account, job.job.partition
    try:
        mine = associations_of(slurm, getpass.getuser(), job.job.cluster)
    except (NotFoundError, SchedulerRefusedError):  # without accounting, there is no such limit
        return None
    fitting = [one.limits for one in mine if account in ("", one.account) and one.partition in ("", partition)]
    return min((one.submitted_jobs for one in fitting if one.submitted_jobs is not None), default=None)

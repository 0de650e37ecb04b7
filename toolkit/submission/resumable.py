"""What a resume cannot change of a run, and the alternative for each."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.config.layout_checks import SHAPE
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory

__all__ = ["check_components", "check_site", "check_tasks"]


def check_site(run: RunDirectory, recorded: ResolvedJob, site: Site | None) -> None:
    """Refuse a site without a scheduler for a run that needs one.

    Raises:
        ToolkitError: the run is an array, or has several components.
    """
    if site is None or site.scheduler.kind != "local":
        return
    several = "an array" if recorded.job.tasks is not None else "of several components" if recorded.component else ""
    if several:
        raise ToolkitError(
            f"run {run.whole.run_id} is {several}, and site {site.name} has no scheduler that could start it",
            where=f"--site {site.name}", fix="leave --site out, or give the name of a cluster",
        )  # fmt: skip


def check_components(run: RunDirectory, recorded: ResolvedJob, keys: Iterable[str]) -> None:
    """Refuse new values of keys that each component sets: a command line cannot name the component.

    Raises:
        ToolkitError: one of `keys`, as in `job.nodes`, is such a key.
    """
    stated = set(SHAPE).union(*(table.stated for table in recorded.component)) if recorded.component else set()
    for key in keys:
        if key.removeprefix("job.") in stated:
            raise ToolkitError(
                f"run {run.run_id} has {len(recorded.component)} components, and each has its own",
                where=key,
                fix="leave it out; another shape is a new run: change a copy of the job file, and `toolkit submit` that "
                f"with --set checkpoint.source=FOLDER, one of `toolkit ckpt ls {run.run_id}`",
            )


def check_tasks(run: RunDirectory, recorded: ResolvedJob, job: ResolvedJob) -> None:
    """Refuse to turn tasks into one job, or one job into tasks: each has a checkpoint folder of its own.

    Raises:
        ToolkitError: the run is an array and the new job is not, or the reverse.
    """
    was_array, place = recorded.job.tasks is not None, job.origin("job.array").place("job.array")
    if was_array == (job.job.tasks is not None):
        return
    name = run.whole.run_id
    if was_array:
        raise ToolkitError(
            f"run {name} is an array, and its tasks stay tasks", where=place,
            fix=f"leave it out; `toolkit resume {name}_T` continues task T alone",
        )  # fmt: skip
    raise ToolkitError(
        f"run {name} is not an array, and its checkpoints belong to no task", where=place,
        fix=f"leave it out, or `toolkit rerun {name} -a {job.job.array}`",
    )  # fmt: skip

"""What a resume cannot change of a run, and how one gets there all the same."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.config.component_checks import SHAPE
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory


def check_site(run: RunDirectory, recorded: ResolvedJob, site: Site | None) -> None:
    """Refuse a site without a scheduler for what only one can start.

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
    """Refuse new values of keys that each component has by itself: no word of a command line says whose they are.

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
    """Refuse to make one piece of work of many tasks, or many of one: what they have saved lies in folders of their own.

    Raises:
        ToolkitError: the run is an array and is to be none, or the other way round.
    """
    was_array, place = recorded.job.tasks is not None, job.origin("job.array").place("job.array")
    if was_array == (job.job.tasks is not None):
        return
    name = run.whole.run_id
    if was_array:
        raise ToolkitError(
            f"run {name} is an array, and its tasks stay tasks", where=place,
            fix=f"leave it out; `toolkit resume {name}_T` goes on with task T alone",
        )  # fmt: skip
    raise ToolkitError(
        f"run {name} is no array, and what it has saved is no task's", where=place,
        fix=f"leave it out, or `toolkit rerun {name} -a {job.job.array}`",
    )  # fmt: skip

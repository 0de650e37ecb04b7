"""Run a job in the foreground: on the nodes of the allocation that this process is in, else on this machine."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from toolkit.config.document import Flag
from toolkit.config.request import JobRequest, resolve
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.errors import ToolkitError, counted
from toolkit.rundir.files import runs_folder
from toolkit.rundir.known_folders import record_folder
from toolkit.rundir.layout import RunDirectory
from toolkit.site.load import choose_site
from toolkit.site.partitions import resolve_in_allocation
from toolkit.submission.allocation import (
    check_here,
    cluster_here,
    environment_of_allocation,
    nodes_of_allocation,
    refuse_shapes,
    tasks_per_node,
)
from toolkit.submission.create import check_sbatch_options, make_run
from toolkit.terminal.talk import say

__all__ = ["flags_of_allocation", "follow_here", "make_here", "resolve_here"]


def resolve_here(
    request: JobRequest, *, inside: Site | None = None, fix_for_several: str = "`toolkit submit ...`"
) -> ResolvedJob:
    """Return the job for the nodes of the allocation that this process is in, else for this machine.

    `inside` is the site of the session that this process has entered; `fix_for_several` is the fix for a job of several
    components.
    """
    stated = resolve(replace(request, ranks=None), None)
    refuse_shapes(stated, fix_for_several)  # on any site
    has_choice = os.environ.get("SLURM_JOB_ID") or os.environ.get("TOOLKIT_SITE")
    default = None if has_choice else "local"
    site = inside if inside is not None and request.site is None else choose_site(request.site or default).site
    if site.scheduler.kind == "slurm":
        request = request.with_flags(flags_of_allocation(request.flags, request.ranks, request.settings))
    else:
        request = _on_one_node(request, stated)
    job = resolve_in_allocation(request, site)
    check_here(job, os.environ)
    check_sbatch_options(request.sbatch_options, for_sbatch=False)
    return job


def _on_one_node(request: JobRequest, job: ResolvedJob) -> JobRequest:
    """Return the request with all ranks of `job`, its job without -n, on this machine, unless the user typed -N.

    Raises:
        ToolkitError: the job has more ranks than this machine has CPUs, and -n does not state their number.
    """
    if job.job.min_nodes == 1 or "job.nodes" in request.flags:
        return request
    ranks, cpus = request.ranks or min(job.rank_counts), len(os.sched_getaffinity(0))
    if request.ranks is None and ranks > cpus:
        raise ToolkitError(
            f"the job has {ranks} ranks on {job.nodes} nodes, but this machine has {counted(cpus, 'CPU')}",
            where=job.origin("job.nodes").place("job.nodes"), fix=f"add -n {cpus}, or `toolkit submit ...`",
        )  # fmt: skip
    say(f"starting {counted(ranks, 'rank')} on this machine in place of {job.nodes} nodes")
    flags = {"job.nodes": Flag(1, "this machine, so -N"), "job.ranks_per_node": Flag(ranks, "-n")}
    if job.job.ranks:
        flags["job.ranks"] = Flag(ranks, "-n")
    return replace(request.with_flags(flags), ranks=None)


def flags_of_allocation(flags: Mapping[str, Flag], ranks: int | None, settings: Sequence[str]) -> dict[str, Flag]:
    """Return the flags that the allocation of this process determines; {} outside an allocation.

    They are the cluster, the nodes and, unless the user set it, the number of ranks per node.
    """
    if not os.environ.get("SLURM_JOB_ID"):
        return {}
    typed = {key: flag.value for key, flag in flags.items()}
    allocation = environment_of_allocation(os.environ)
    decided = {
        "job.cluster": Flag(cluster_here(os.environ, typed.get("job.cluster")), "-M"),
        "job.nodes": Flag(nodes_of_allocation(allocation, typed.get("job.nodes")), "-N"),
    }
    is_set = any(setting.startswith("job.ranks_per_node") for setting in settings)
    if not is_set and ranks is None and "job.ranks_per_node" not in typed and (tasks := tasks_per_node(allocation)):
        decided["job.ranks_per_node"] = Flag(tasks, "--ntasks-per-node")
    return decided


def make_here(request: JobRequest, job: ResolvedJob) -> RunDirectory:
    """Create the run directory of a job that starts in the foreground."""
    run = make_run(job, runs_folder(request.runs, os.environ, job.paths.runs), here=True, calls=request.calls)
    record_folder(run.path.parents[1])
    return run


def follow_here(
    run: RunDirectory, job: ResolvedJob, start: int, write: Callable[[str], object], report: Callable[[str], object]
) -> int:  # fmt: skip
    """Run one start in the foreground until it ends; return the exit code. `write` receives the output of the ranks."""
    from rich.console import Console

    from toolkit.runs.follow.follow import exit_code_of, report_end
    from toolkit.runs.status.state import run_status
    from toolkit.submission.foreground import Interrupts, show_output, start_here

    earlier = len(run.attempt_numbers())
    with Interrupts(run) as interrupts:
        report(f"run {run.run_id}, in {run.path}")
        supervisor = interrupts.supervisor = start_here(run, job, start)
        show_output(run, supervisor, write, report, first_attempt=earlier)
    status = run_status(run)
    report_end(status, run, Console(stderr=True))
    return exit_code_of(status)

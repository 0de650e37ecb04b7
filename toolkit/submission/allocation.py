"""Read the allocation of the `toolkit run` process from salloc's variables: nodes, tasks, CPUs."""

import re
from collections.abc import Mapping

from toolkit.config.layout_checks import refuse_components
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError, counted
from toolkit.runs.record.job import uses_slurm
from toolkit.slurm.records import cluster_of_allocation

__all__ = [
    "check_here", "cluster_here", "environment_of_allocation", "nodes_of_allocation", "refuse_shapes",
    "tasks_per_node",
]  # fmt: skip

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")

# Variables of a step or of an array task. In salloc's own interactive step, which occupies no CPUs, they are kept.
_OF_STEP = re.compile(
    r"SLURM_(STEP|SRUN_COMM|CPU_BIND|MEM_BIND|ARRAY_).*|PMIX?_.*"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID|NTASKS|NPROCS|TASKS_PER_NODE|NNODES|NODELIST|MPI_TYPE)"
)
_INTERACTIVE_STEP = "4294967290"


def environment_of_allocation(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the allocation itself, also for a process inside a step of it (`srun --pty bash`).

    srun would read many variables of a step as its options. The enclosing step occupies CPUs, so ours must overlap it.
    """
    if environ.get("SLURM_STEP_ID", _INTERACTIVE_STEP) == _INTERACTIVE_STEP:
        return {name: value for name, value in environ.items() if not name.startswith("SLURM_ARRAY_")}
    kept = {name: value for name, value in environ.items() if not _OF_STEP.fullmatch(name)}
    # Open MPI reads its nodes and slots from these; each CPU is a slot, as in salloc without a number of tasks.
    of_job = {
        "SLURM_NODELIST": "SLURM_JOB_NODELIST", "SLURM_NNODES": "SLURM_JOB_NUM_NODES",
        "SLURM_TASKS_PER_NODE": "SLURM_JOB_CPUS_PER_NODE",
    }  # fmt: skip
    whole = {name: environ[source] for name, source in of_job.items() if source in environ}
    return {**kept, **whole, "SLURM_OVERLAP": "1"}


def nodes_of_allocation(environ: Mapping[str, str], asked: str | int | None) -> str:
    """Return the number of nodes of this allocation; a run uses all of them.

    Raises:
        ToolkitError: `asked`, the value of -N, differs from it.
    """
    given = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    if asked is not None and str(asked) != given:
        raise ToolkitError(
            f"allocation {environ['SLURM_JOB_ID']} has {counted(int(given), 'node')}, all of which a foreground run uses",
            where=f"-N {asked}",
            fix=f"omit -N, or `salloc -N {asked} toolkit run ...`",
        )
    return given


def cluster_here(environ: Mapping[str, str], asked: str | None) -> str:
    """Return the cluster of this allocation, as a run records it: "" for the site's own.

    Raises:
        ToolkitError: `asked`, the value of -M, differs from it.
    """
    given = cluster_of_allocation(environ)
    own = given or environ.get("SLURM_CLUSTER_NAME", "")
    if asked not in (None, given, own):
        raise ToolkitError(
            f"allocation {environ['SLURM_JOB_ID']} is on {f'cluster {own}' if own else 'the cluster of this site'}",
            where=f"-M {asked}",
            fix=f"omit -M, or `salloc -M {asked} toolkit run ...`",
        )
    return given


def tasks_per_node(environ: Mapping[str, str]) -> str | None:
    """Return the tasks per node that the user requested from salloc; None if not requested, or if nodes differ."""
    if "SLURM_NTASKS" not in environ:  # SLURM_TASKS_PER_NODE is then the number of CPUs
        return None
    counts = set(_counts(environ.get("SLURM_TASKS_PER_NODE", "")))
    return str(counts.pop()) if len(counts) == 1 else None


def check_here(job: ResolvedJob, environ: Mapping[str, str], *, resumed: str = "") -> None:
    """Refuse a job that cannot run in the foreground: on a Slurm cluster it needs a large enough allocation.

    Raises:
        ToolkitError: there is no allocation, or it has too few CPUs, which srun would report without numbers.
    """
    if not uses_slurm(job):
        return
    table = job.job
    queued = f"`toolkit resume {resumed}`" if resumed else "`toolkit submit ...`"
    here = f"toolkit resume {resumed} --here" if resumed else "toolkit run ..."
    if table.array:
        raise ToolkitError(
            "cannot run an array here: its tasks are separate jobs, and this allocation is a single job",
            where=job.origin("job.array").place("job.array"),
            fix=queued if resumed else f"{queued}, or --set job.array= for a single run without task number",
        )
    if table.repeat > 1:
        raise ToolkitError(
            f"expected one job in this allocation, got {table.repeat} repeated jobs",
            where=job.origin("job.repeat").place("job.repeat"),
            fix=f"{queued}, or --repeat 1",
        )
    refuse_shapes(job, queued)
    if int(environ.get("SLURM_HET_SIZE") or 1) > 1:
        raise ToolkitError(
            f"allocation {environ['SLURM_JOB_ID']} has {environ['SLURM_HET_SIZE']} components, but a foreground run uses only one",
            fix="`toolkit submit` a job with a [[component]] for each, or `salloc` one component",
        )
    wanted = f"salloc -N {table.nodes} --ntasks-per-node {table.ranks_per_node}"
    wanted += f" -c {table.cpus_per_rank}" if table.cpus_per_rank > 1 else ""
    if not environ.get("SLURM_JOB_ID"):
        raise ToolkitError(
            f"site {job.site.name} is a Slurm cluster, but this process is not in an allocation",
            fix=f"{queued}, `{wanted} {here}`, or --site local",
        )
    needed = table.ranks_per_node * table.cpus_per_rank
    given = min(_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", "")), default=needed)
    if needed > given:
        fits = given // table.cpus_per_rank
        raise ToolkitError(
            f"{counted(table.ranks_per_node, 'rank')} x {counted(table.cpus_per_rank, 'CPU')} = {needed} CPUs per node, but the "
            f"allocation {environ['SLURM_JOB_ID']} has {given}",
            where=job.origin("job.ranks_per_node").place("job.ranks_per_node"),
            fix=(f"--ntasks-per-node {fits}, or " if fits else "") + f"`{wanted} {here}`",
        )


def refuse_shapes(job: ResolvedJob, fix: str) -> None:
    """Refuse a job with components.

    Raises:
        ToolkitError: it has some.
    """
    refuse_components(job, f"a foreground run has one component, but the job has {len(job.components)}", fix)


def _counts(text: str) -> list[int]:
    """Return Slurm's count for each node: `2(x3),1` is 2, 2, 2, 1."""
    return [int(count) for count, times in _COUNT.findall(text) for _ in range(int(times or 1))]

"""Checks of heterogeneous jobs: what Slurm rejects, and keys whose single value cannot fit unlike components."""

from __future__ import annotations

from toolkit.config.refusal import refuse
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError

_OVER_THE_FILE = ("SBATCH_*", "TOOLKIT_*", "flag")
SHAPE = ("nodes", "ranks_per_node")  # each component may set its own


def check_components(resolved: ResolvedJob) -> None:
    """Check that Slurm can start a job with components as one step.

    Raises:
        ToolkitError: another key contradicts them; the message contains the fix.
    """
    if not resolved.component:
        return
    _check_flags(resolved)
    if resolved.scheduler.kind == "local":
        raise refuse(
            resolved, "component", f"site {resolved.site.name} has no scheduler to allocate nodes of several shapes",
            "--site with the name of a cluster, or remove the components",
        )  # fmt: skip
    if resolved.launcher.kind not in ("auto", "srun"):
        raise refuse(
            resolved, "component", f"only srun starts ranks in several components, but the launcher of site "
            f"{resolved.site.name} is {resolved.launcher.kind}",
            'launcher.kind = "srun" in the site file, or remove the components',
        )  # fmt: skip
    if resolved.job.array:
        raise refuse(resolved, "job.array", "Slurm does not support arrays of heterogeneous jobs", "remove it")
    if resolved.job.repeat > 1:
        raise refuse(
            resolved, "job.repeat", "repeated jobs are an array, but Slurm does not support arrays of heterogeneous jobs",
            "repeat = 1",
        )  # fmt: skip
    _check_nodes(resolved)


def refuse_components(resolved: ResolvedJob, message: str, fix: str) -> None:
    """Reject a job with components where toolkit supports only one shape.

    Raises:
        ToolkitError: the job has components.
    """
    if resolved.component:
        raise refuse(resolved, "component", message, fix)


def _check_flags(resolved: ResolvedJob) -> None:
    """Reject a flag over a key that components set themselves: it applies to [job], so they would ignore it."""
    for name in type(resolved.component[0]).model_fields:
        origin = resolved.origin(f"job.{name}")
        saying = [number for number, table in enumerate(resolved.component) if name in table.stated]
        if origin.layer in _OVER_THE_FILE and (saying or name in SHAPE):
            raise ToolkitError(
                f"the job has {len(resolved.component)} components, and each of them sets {name}",
                where=origin.place(f"job.{name}"),
                fix=f"remove it, and set component[{saying[0] if saying else 0}].{name} in the job file",
            )


def _check_nodes(resolved: ResolvedJob) -> None:
    for number, one in enumerate(resolved.components):
        if one.job.min_nodes != one.job.max_nodes:
            raise refuse(
                resolved, "job.nodes", f"component[{number}] does not set nodes, and {one.job.nodes} is a range",
                f"nodes = {one.job.min_nodes}, or nodes = ... in each [[component]]",
            )  # fmt: skip
    if resolved.job.nodelist and sum("nodelist" not in table.stated for table in resolved.component) > 1:
        raise refuse(
            resolved, "job.nodelist", "the nodes of one component cannot be in another", "set nodelist in its [[component]]",
        )  # fmt: skip

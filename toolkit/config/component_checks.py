"""What a heterogeneous job cannot have: what Slurm refuses of one, and what would be one number for unlike components."""

from __future__ import annotations

from toolkit.config.refusal import refuse
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError

_OVER_THE_FILE = ("SBATCH_*", "TOOLKIT_*", "flag")
SHAPE = ("nodes", "ranks_per_node")  # what every component has of its own


def check_components(resolved: ResolvedJob) -> None:
    """Check that a job with components is one that Slurm starts as one step.

    Raises:
        ToolkitError: another key contradicts them; the message has the fix.
    """
    if not resolved.component:
        return
    _check_flags(resolved)
    if resolved.scheduler.kind == "local":
        raise refuse(
            resolved, "component", f"site {resolved.site.name} has no scheduler that gives nodes of several shapes",
            "--site with the name of a cluster, or leave the components out",
        )  # fmt: skip
    if resolved.launcher.kind not in ("auto", "srun"):
        raise refuse(
            resolved, "component", f"of the launchers only srun starts ranks in several components, and site "
            f"{resolved.site.name} has {resolved.launcher.kind}",
            'launcher.kind = "srun" in the site file, or leave the components out',
        )  # fmt: skip
    if resolved.job.array:
        raise refuse(resolved, "job.array", "an array of heterogeneous jobs is unknown to Slurm", "leave it out")
    if resolved.job.repeat > 1:
        raise refuse(
            resolved, "job.repeat", "repeated jobs are an array, and Slurm has no arrays of heterogeneous jobs",
            "repeat = 1",
        )  # fmt: skip
    _check_nodes(resolved)


def refuse_components(resolved: ResolvedJob, message: str, fix: str) -> None:
    """Refuse a job with components where only one shape can be served.

    Raises:
        ToolkitError: it has some.
    """
    if resolved.component:
        raise refuse(resolved, "component", message, fix)


def _check_flags(resolved: ResolvedJob) -> None:
    """What comes over the job file is for [job]: a component that says the same key would keep its own, unheard."""
    for name in type(resolved.component[0]).model_fields:
        origin = resolved.origin(f"job.{name}")
        saying = [number for number, table in enumerate(resolved.component) if name in table.stated]
        if origin.layer in _OVER_THE_FILE and (saying or name in SHAPE):
            raise ToolkitError(
                f"the job has {len(resolved.component)} components, and {name} is said for each of them",
                where=origin.place(f"job.{name}"),
                fix=f"leave it out, and write component[{saying[0] if saying else 0}].{name} in the job file",
            )


def _check_nodes(resolved: ResolvedJob) -> None:
    for number, one in enumerate(resolved.components):
        if one.job.min_nodes != one.job.max_nodes:
            raise refuse(
                resolved, "job.nodes", f"component[{number}] has no nodes of its own, and {one.job.nodes} is a range",
                f"nodes = {one.job.min_nodes}, or nodes = ... in each [[component]]",
            )  # fmt: skip
    if resolved.job.nodelist and sum("nodelist" not in table.stated for table in resolved.component) > 1:
        raise refuse(
            resolved, "job.nodelist", "the nodes of one component cannot be in another", "write nodelist in its [[component]]",
        )  # fmt: skip

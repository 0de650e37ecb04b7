"""The choice between flat collectives and two tiers (within and across nodes), from `[parallel] reduction` and the layout."""

import sys

from toolkit.errors import ToolkitError
from toolkit.topology.facts import Topology
from toolkit.topology.groups import GroupPlan, plan_reduction
from toolkit.world.facts import World


def choose_tiers(what: str, ranks: int, world: World, setting: str, topology: Topology) -> tuple[GroupPlan, str]:
    """Return the groups of both tiers, or none, and a log line with the reason; rank 0 prints it to stderr.

    Args:
        what: name of the collectives in the log line.
        ranks: number of ranks that take part.
        setting: "auto", "flat" or "hierarchical".

    Raises:
        ToolkitError: `setting` is "hierarchical", and the layout, or the number of ranks, does not allow it.
    """
    plan = plan_reduction(topology, setting)
    if plan.hierarchical and ranks != world.size:
        reason = f"the model is replicated over {ranks} of {world.size} ranks"
        if setting == "hierarchical":
            raise ToolkitError(reason, where="parallel.reduction", fix='set reduction = "flat"')
        plan = GroupPlan((), (), reason)
    return plan, say(world, f"{what}: {'hierarchical' if plan.hierarchical else 'flat'} ({plan.reason})")


def say(world: World, line: str) -> str:
    """Print `line` to stderr on rank 0; return it."""
    if world.rank == 0:
        sys.stderr.write(line + "\n")
    return line

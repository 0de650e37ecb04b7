"""Whether a model's exchanges go in two tiers, within nodes and across: as `[parallel] reduction` and the layout say."""

from __future__ import annotations

import sys

from toolkit.errors import ToolkitError
from toolkit.topology.facts import Topology
from toolkit.topology.groups import GroupPlan, plan_reduction
from toolkit.world.facts import World


def choose_tiers(what: str, ranks: int, world: World, setting: str, topology: Topology) -> tuple[GroupPlan, str]:
    """The groups of both tiers, or none; and a line that says which it is and why, which rank 0 says on stderr.

    Args:
        what: the exchanges, as the line names them.
        ranks: how many make them together.
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
    """Rank 0 says it on stderr; the line again."""
    if world.rank == 0:
        sys.stderr.write(line + "\n")
    return line

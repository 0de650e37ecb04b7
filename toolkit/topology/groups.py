"""Plan the rank groups of a hierarchical reduction: the ranks on each node, and the ranks with the same local index.

The plan depends only on the nodes of the ranks. If these are unknown or have unequal numbers of ranks, it is flat.
"""

from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.topology.facts import Topology

__all__ = ["GroupPlan", "RankGroups", "plan_groups", "plan_reduction"]

RankGroups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GroupPlan:
    """Groups of global ranks; both tuples are empty if the reduction must be flat.

    `node_groups[n]` are the ranks of node n, ascending; `cross_groups[i]` are the ranks with local index i on
    every node, in the order of nodes. `reason` is one line for the user.
    """

    node_groups: RankGroups
    cross_groups: RankGroups
    reason: str

    @property
    def hierarchical(self) -> bool:
        """Whether the reduction has two levels, within nodes and across nodes."""
        return bool(self.node_groups)


def plan_groups(topology: Topology) -> GroupPlan:
    """Return the groups for the placement of the ranks on nodes, or a flat plan with the reason."""
    nodes = tuple(topology.ranks_by_host.values())
    counts = sorted({len(ranks) for ranks in nodes})
    if topology.unplaced_ranks:
        return _flat(f"the host of ranks {_listed(topology.unplaced_ranks)} is unknown")
    if topology.conflicts:
        return _flat(topology.conflicts[0])
    if len(nodes) < 2:
        return _flat("there is one rank" if topology.size == 1 else f"all {topology.size} ranks are on one node")
    if len(counts) > 1:
        return _flat(f"nodes have unequal numbers of ranks, {counts[0]} to {counts[-1]}")
    if counts == [1]:
        return _flat(f"each of {len(nodes)} nodes has one rank")
    reason = f"{len(nodes)} nodes with {counts[0]} ranks each"
    return GroupPlan(nodes, tuple(zip(*nodes, strict=True)), reason)


def plan_reduction(topology: Topology, setting: str) -> GroupPlan:
    """Return the plan for the key `[parallel] reduction`.

    Args:
        setting: "auto" depends on the placement, "flat" is always flat, "hierarchical" never falls back to flat.

    Raises:
        ToolkitError: the setting is "hierarchical", but the placement does not allow two levels.
    """
    if setting not in ("auto", "flat", "hierarchical"):
        raise ToolkitError(
            f'expected "auto", "flat" or "hierarchical", got {setting!r}',
            where="parallel.reduction",
            fix="set reduction to auto, flat, hierarchical or measured",
        )
    if setting == "flat":
        return _flat("the job sets parallel.reduction to flat")
    plan = plan_groups(topology)
    if setting == "hierarchical" and not plan.hierarchical:
        raise ToolkitError(
            f"a hierarchical reduction requires two or more nodes with the same number of ranks, at least two each, but "
            f"{plan.reason}",
            where="parallel.reduction",
            fix='set reduction = "auto", or change job.nodes and job.ranks_per_node',
        )
    return plan


def _flat(reason: str) -> GroupPlan:
    return GroupPlan((), (), reason)


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")

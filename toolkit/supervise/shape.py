"""The shape of a run: its nodes and ranks per node, for each component of a heterogeneous job. Other jobs have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from toolkit.supervise.allocation import Allocation

__all__ = ["Shape", "shape_of_job"]


@dataclass(frozen=True)
class Component:
    """A group of identical nodes, with the ranks per node and the CPUs per rank (0: the launcher's default)."""

    nodes: int
    ranks_per_node: int
    cpus_per_rank: int = 0
    total: int = 0  # the number of ranks if they do not fill the nodes

    @property
    def ranks(self) -> int:
        return self.total or self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Shape:
    """The components of a run; rank numbers continue across them, from 0 in the first one."""

    components: tuple[Component, ...]
    is_once: bool = False  # one script on the first node, which starts ranks itself

    @classmethod
    def of(cls, nodes: int, ranks_per_node: int, cpus_per_rank: int = 0, total: int = 0) -> Shape:
        """Return the shape of a single component."""
        return cls((Component(nodes, ranks_per_node, cpus_per_rank, total),))

    @property
    def nodes(self) -> int:
        return sum(one.nodes for one in self.components)

    @property
    def ranks(self) -> int:
        return 1 if self.is_once else sum(one.ranks for one in self.components)

    @property
    def leader(self) -> Component:
        """The component with the batch host and rank 0. Launchers other than srun support only one component."""
        return self.components[0]

    def component_of(self, rank: int) -> Component:
        """Return the component that a rank belongs to."""
        behind = 0
        for one in self.components[:-1]:
            behind += one.ranks
            if rank < behind:
                return one
        return self.components[-1]


def shape_of_job(job: Mapping[str, Any], nodes: int | None = None) -> Shape:
    """Return the shape that a job requests. With one component, it has the allocated `nodes`, else the minimum."""
    tables = [one["job"] for one in job.get("resolved_components") or ()] or [job["job"]]
    components = [
        Component(
            int(str(table.get("nodes") or 1).split("-")[0]),  # the minimum of a range such as "2-4"
            int(table.get("ranks_per_node") or 1),
            int(table.get("cpus_per_rank") or 0),
            int(table.get("ranks") or 0),
        )
        for table in tables
    ]
    if job["job"].get("once"):
        least = sum(one.nodes for one in components)
        return Shape((Component(nodes or least, 1, components[0].cpus_per_rank),), is_once=True)
    if nodes is not None and len(components) == 1:
        (one,) = components
        return Shape.of(nodes, one.ranks_per_node, one.cpus_per_rank, one.total)
    return Shape(tuple(components))


def check_components(asked: Shape, allocation: Allocation) -> None:
    """Check that the allocation has the components of the job; the user may have requested it by hand.

    Raises:
        ToolkitError: the allocation has other components.
    """
    given, wanted = allocation.nodes_of_components, tuple(one.nodes for one in asked.components)
    if asked.is_once or (len(given) == len(wanted) and (len(wanted) == 1 or given == wanted)):
        return
    raise ToolkitError(
        f"expected components with the node counts {', '.join(map(str, wanted))}, but job {allocation.job_id} has "
        f"components with {', '.join(map(str, given))}",
        fix=f"`scancel {allocation.job_id}`, then submit the script unchanged",
    )

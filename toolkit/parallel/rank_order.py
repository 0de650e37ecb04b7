"""Choose each rank's position in the mesh by hardware tiers (node, switch, ...), and log the reason; without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from toolkit.config.train import ParallelTable
from toolkit.errors import ToolkitError
from toolkit.topology.facts import Topology
from toolkit.topology.groups_shown import where_met
from toolkit.topology.placement import DIMENSIONS, Placement, as_launched, nominal_traffic, place
from toolkit.topology.tiers import Link, Tiers, tiers_of
from toolkit.topology.tiers_found import tiers_of_topology
from toolkit.topology.traffic import Traffic


@dataclass(frozen=True)
class RankOrder:
    """A mesh of ranks, and its log line."""

    placement: Placement
    line: str


def order_ranks(
    parallel: ParallelTable,
    topology: Topology,
    traffic: Mapping[str, Traffic] | None = None,
    *,
    keeps_order: bool = True,
) -> RankOrder:
    """Return the cheapest order of ranks that `parallel.placement` and the known facts allow.

    Args:
        topology: the topology of all ranks of the job.
        traffic: the communication of each dimension per step; nominal if the model is unknown.
        keeps_order: whether a process group can have its ranks in any order; otherwise only the launcher's order is
            possible.

    Raises:
        ToolkitError: the mesh does not match the number of ranks, or tensor-parallel groups would cross nodes.
    """
    sizes = parallel.sizes(topology.size)
    exchanged = {**nominal_traffic(sizes), **(traffic or {})}
    if topology.size == 1:
        return RankOrder(as_launched(_anywhere(1), sizes, exchanged), "mesh: one rank")
    notes: list[str] = []
    tiers = _tiers_or_reason(parallel, topology, notes)
    if isinstance(tiers, str):
        launched = as_launched(_anywhere(topology.size), sizes, exchanged)
        return RankOrder(launched, f"{_mesh(launched)}; ranks as launched: {tiers}")
    before, after = as_launched(tiers, sizes, exchanged), place(tiers, sizes, exchanged)
    by = "by this model's traffic" if traffic else "by nominal traffic"
    if after.packed and not keeps_order:
        said = f"this torch sorts the ranks of a group; torch 2.13 would save {_gain(before, after)} {by}"
        return RankOrder(before, f"{_mesh(before)}; ranks as launched: {said}")
    if not after.packed:
        known = f"; {_facts(len(notes))} unknown, see `toolkit topo show`" if notes else ""
        return RankOrder(after, f"{_mesh(after)}; ranks as launched: no other order is faster {by}{known}")
    met = ", ".join(f"{name} in {where_met(tiers, cost)}" for name, cost in after.costs.items())
    return RankOrder(after, f"{_mesh(after)}; ranks placed ({met}): predicted to save {_gain(before, after)} {by}")


def _tiers_or_reason(parallel: ParallelTable, topology: Topology, notes: list[str]) -> Tiers | str:
    """Return the tiers for placement, or why there are none, because inconsistent facts must not fail a job."""
    if parallel.placement == "launched":
        return "by parallel.placement"
    if topology.unplaced_ranks:
        return f"the hosts of {len(topology.unplaced_ranks)} ranks are unknown"
    if topology.conflicts:
        return topology.conflicts[0]
    try:
        return tiers_of_topology(topology, notes=notes)
    except ToolkitError as error:
        return error.message


def _anywhere(size: int) -> Tiers:
    """Return a single tier for ranks on unknown hosts."""
    return tiers_of([("cluster", [0] * size, Link(0.0, inf, "unknown"))])


def _mesh(placement: Placement) -> str:
    sizes = zip(DIMENSIONS, placement.mesh.shape, strict=True)
    return "mesh: " + " x ".join(f"{name} {size}" for name, size in sizes if size > 1)


def _facts(count: int) -> str:
    return "1 topology fact is" if count == 1 else f"{count} topology facts are"


def _gain(before: Placement, after: Placement) -> str:
    saved = 1 - after.seconds / before.seconds
    return f"{saved:.0%} of the {before.seconds * 1e3:.3g} ms of communication per step as launched,"

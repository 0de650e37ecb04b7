"""Show the groups of a job's mesh on a cluster, in launch order and after placement, as a table or as JSON."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from toolkit.topology.placement import Placement
from toolkit.topology.tiers import Tiers
from toolkit.topology.traffic import DimensionCost, Traffic

__all__ = ["groups_as_json", "groups_as_rows", "where_met"]


def groups_as_json(tiers: Tiers, before: Placement, after: Placement, traffic: Mapping[str, Traffic]) -> dict[str, Any]:
    """Return the JSON object that `topo groups` prints; docs/topology.md documents its keys."""
    return {
        "ranks": tiers.size,
        "tiers": [
            {
                "name": level.name,
                "groups": int(level.group_of.max()) + 1,
                "latency_s": level.link.latency_s,
                "bytes_per_s": level.link.bytes_per_s,
                "source": level.link.source,
            }
            for level in tiers.levels
        ],
        "traffic": {name: asdict(traffic[name]) for name in after.costs},
        "dimensions": {
            name: {"as_launched": _cost(tiers, before.costs[name]), "placed": _cost(tiers, cost)}
            for name, cost in after.costs.items()
        },
        "seconds": {"as_launched": before.seconds, "placed": after.seconds},
        "packed": list(after.packed),
        "order": after.mesh.ravel().tolist(),
        "compromises": list(after.compromises),
    }


def _cost(tiers: Tiers, cost: DimensionCost) -> dict[str, Any]:
    return {
        "groups": cost.groups,
        "size": cost.size,
        "groups_at": {name: count for name, count in zip(tiers.names, cost.groups_at, strict=True) if count},
        "worst": tiers.names[cost.worst],
        "busiest": tiers.names[cost.busiest],
        "seconds": cost.seconds,
    }


def groups_as_rows(tiers: Tiers, before: Placement, after: Placement) -> list[tuple[str, ...]]:
    """Return a row per dimension: name, groups, then tier and milliseconds per step, as launched and as placed."""
    return [
        (
            name,
            f"{cost.groups} of {cost.size}",
            where_met(tiers, before.costs[name]),
            f"{before.costs[name].seconds * 1e3:.1f}",
            where_met(tiers, cost),
            f"{cost.seconds * 1e3:.1f}",
        )
        for name, cost in after.costs.items()
    ]


def where_met(tiers: Tiers, cost: DimensionCost) -> str:
    """Return the tiers that the groups span, such as "leaf", or "24 cluster, 8 leaf" with the slowest first."""
    counts = [(count, name) for count, name in zip(cost.groups_at, tiers.names, strict=True) if count]
    return counts[0][1] if len(counts) == 1 else ", ".join(f"{count} {name}" for count, name in reversed(counts))

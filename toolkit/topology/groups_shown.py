"""The groups of a job's mesh on a cluster, before and after placement, as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from toolkit.topology.placement import Placement
from toolkit.topology.tiers import Tiers
from toolkit.topology.traffic import DimensionCost, Traffic


def groups_as_json(tiers: Tiers, before: Placement, after: Placement, traffic: Mapping[str, Traffic]) -> dict[str, Any]:
    """Every dimension as launched and as placed, the order of ranks, and what does not lie as it should."""
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
    """One row a dimension: name, groups, where they meet and milliseconds of a step as launched, and as placed."""
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
    """Where groups meet: "leaf", or "24 cluster, 8 leaf" with the worst first."""
    found = [(count, name) for count, name in zip(cost.groups_at, tiers.names, strict=True) if count]
    return found[0][1] if len(found) == 1 else ", ".join(f"{count} {name}" for count, name in reversed(found))


def stretches(numbers: Sequence[int]) -> list[str]:
    """Numbers in their order, those of equal distance in short: "0-7", "0-30:2"."""
    said = []
    begin = 0
    while begin < len(numbers):
        end = begin + 1
        distance = numbers[end] - numbers[begin] if end < len(numbers) else 0
        while end < len(numbers) and numbers[end] - numbers[end - 1] == distance:
            end += 1
        if end - begin < 3:
            end = begin + 1
            said.append(str(numbers[begin]))
        else:
            said.append(f"{numbers[begin]}-{numbers[end - 1]}" + (f":{distance}" if distance != 1 else ""))
        begin = end
    return said

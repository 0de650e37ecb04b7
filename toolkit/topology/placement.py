"""Place a mesh of ranks on the tiers of a cluster (see tiers.py), and predict the cost of its communication.

The mesh has the dimensions pp, replicate, shard, cp and tp. Tensor parallel ranks communicate most, in every layer, so
toolkit packs them first, into NVLink cliques. It then tries every order of packing the other dimensions, and selects
the order with the lowest predicted cost. Expert parallel groups are consecutive ranks of shard x cp.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

import numpy as np

from toolkit.errors import ToolkitError
from toolkit.topology.mesh_choices import nearest_meshes, settings_of
from toolkit.topology.tiers import Tiers
from toolkit.topology.traffic import DimensionCost, Traffic, dimension_cost

__all__ = ["DIMENSIONS", "NOWHERE", "Placement", "as_launched", "groups_of", "nominal_traffic", "pack", "place"]

NOWHERE = -1  # the group of a unit (a set of ranks that is already packed) whose ranks are in several groups of a tier


def pack(places: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Join units (sets of ranks) into groups of `size` units, preferably within one group of a fine tier.

    Args:
        places: (tiers, units), the group of each unit in each tier, or `NOWHERE` if the unit crosses groups. The finest
            tier is first; all units are in one group of the last tier.
        size: number of units per group, a divisor of the number of units.

    Returns:
        The unit numbers of each group, (groups, size), sorted by first unit; and the `places` of the groups,
        (tiers, groups).
    """
    tiers, units = places.shape
    assert units % size == 0, (units, size)
    rest = np.arange(units)
    packed: list[np.ndarray] = []
    for tier in range(tiers):
        joined, rest = _join(rest, places[: tier + 1], size)
        packed.append(joined)
    groups = np.concatenate(packed)
    groups = groups[np.argsort(groups[:, 0], kind="stable")]
    member_places = places[:, groups]
    is_same = (member_places == member_places[:, :, :1]).all(axis=2)
    return groups, np.where(is_same, member_places[:, :, 0], NOWHERE)


def _join(units: np.ndarray, places: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (full groups of units that are in the same group of the last of these tiers, remaining units)."""
    # Sort the units of a group by finer tiers, so that the units of one clique stay together.
    order = np.lexsort((units, *(places[tier, units] for tier in range(len(places)))))
    ordered = units[order]
    labels = places[-1, ordered]
    starts = np.flatnonzero(np.r_[True, labels[1:] != labels[:-1]]) if len(labels) else np.empty(0, dtype=int)
    counts = np.diff(np.r_[starts, len(labels)])
    index_in_label = np.arange(len(labels)) - np.repeat(starts, counts)
    joinable = np.repeat(np.where(labels[starts] == NOWHERE, 0, counts // size * size), counts)
    is_joined = index_in_label < joinable
    return ordered[is_joined].reshape(-1, size), np.sort(ordered[~is_joined])


DIMENSIONS = ("pp", "replicate", "shard", "cp", "tp")  # the axes of the mesh, outermost first
_PACKED_FIRST = ("tp", "cp", "shard", "replicate", "pp")

_NOMINAL_BYTES = 1e9


def nominal_traffic(sizes: Mapping[str, int]) -> dict[str, Traffic]:
    """Return the assumed communication of each dimension in a training step of a transformer of unknown shape.

    tp all-reduces activations four times per layer. ep sends tokens to experts and back, in the forward and the backward
    pass. shard gathers parameters twice and reduce-scatters gradients. replicate all-reduces the gradients of a shard.
    pp sends activations. If the shape of the model is known, use `model_traffic`, which cites its sources.
    """
    gradients = _NOMINAL_BYTES / (sizes.get("shard", 1) * sizes.get("cp", 1))
    return {
        "tp": Traffic("all-reduce", 4 * _NOMINAL_BYTES, 128, "nominal"),
        "cp": Traffic("all-to-all", 2 * _NOMINAL_BYTES, 64, "nominal"),
        "ep": Traffic("all-to-all", 4 * _NOMINAL_BYTES, 128, "nominal"),
        "shard": Traffic("gather-scatter", 3 * _NOMINAL_BYTES, 96, "nominal"),
        "replicate": Traffic("all-reduce", gradients, 32, "nominal"),
        "pp": Traffic("send", 0.05 * _NOMINAL_BYTES, 16, "nominal"),
    }


@dataclass(frozen=True)
class Placement:
    """A mesh on a cluster.

    `mesh` contains ranks; its axes are `DIMENSIONS`. `packed` lists the dimensions with more than one rank in the order
    of packing; it is empty if the ranks keep the launch order. `compromises` describes groups that cross a slow tier.
    """

    mesh: np.ndarray
    packed: tuple[str, ...]
    costs: Mapping[str, DimensionCost]
    compromises: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Predicted communication time of a step in seconds, if the dimensions communicate sequentially."""
        return sum(cost.seconds for cost in self.costs.values())


def place(tiers: Tiers, sizes: Mapping[str, int], traffic: Mapping[str, Traffic] | None = None) -> Placement:
    """Return the placement of a mesh with the lowest predicted cost.

    Args:
        sizes: size of each dimension, by default 1.
        traffic: communication of each dimension, by default `nominal_traffic`.

    Raises:
        ToolkitError: the mesh does not match the number of ranks, or tp groups that fit into a node would cross nodes.
    """
    full = _checked(tiers, sizes)
    _check_tensor_parallel(tiers, full)
    traffic = traffic or nominal_traffic(full)
    # For equal costs, `min` prefers the launch order, then the usual order of dimensions.
    candidates = [
        as_launched(tiers, sizes, traffic),
        *(_placed(tiers, full, order, traffic) for order in _orders(full)),
    ]
    return min(candidates, key=lambda placement: round(placement.seconds, 12))


def as_launched(tiers: Tiers, sizes: Mapping[str, int], traffic: Mapping[str, Traffic] | None = None) -> Placement:
    """Return the mesh with ranks in launch order, as `init_device_mesh` of torch builds it."""
    full = _checked(tiers, sizes)
    mesh = np.arange(tiers.size).reshape([full[name] for name in DIMENSIONS])
    return _assessed(tiers, mesh, full["ep"], (), traffic or nominal_traffic(full))


def groups_of(mesh: np.ndarray, dimensions: str | Sequence[str], ep: int = 1) -> np.ndarray:
    """Return the groups of one dimension, of several joined dimensions, or of "ep": (groups, members), in mesh order.

    Ranks of "expert_shard" have the same experts, but data of their own.
    """
    if dimensions == "ep":
        return groups_of(mesh, ("shard", "cp")).reshape(-1, ep)
    if dimensions == "expert_shard":
        joined = groups_of(mesh, ("shard", "cp"))
        copies = joined.shape[1] // ep
        return joined.reshape(-1, copies, ep).transpose(0, 2, 1).reshape(-1, copies)
    named = (dimensions,) if isinstance(dimensions, str) else tuple(dimensions)
    axes = [DIMENSIONS.index(name) for name in named]
    assert axes == sorted(axes), f"expected the order of {DIMENSIONS}, got {named}"
    return np.moveaxis(mesh, axes, range(-len(axes), 0)).reshape(-1, prod(mesh.shape[axis] for axis in axes))


def _orders(sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    first = tuple(name for name in ("tp",) if sizes[name] > 1)
    others = [name for name in _PACKED_FIRST if name != "tp" and sizes[name] > 1]
    for order in permutations(others):
        yield (*first, *order)


def _placed(
    tiers: Tiers, sizes: Mapping[str, int], order: tuple[str, ...], traffic: Mapping[str, Traffic]
) -> Placement:
    places = np.stack([level.group_of for level in tiers.levels])
    members = np.arange(tiers.size)[:, None]  # (units, ranks per unit); the dimension packed last is the outermost
    for name in order:
        groups, places = pack(places, sizes[name])
        members = members[groups].reshape(len(groups), -1)
    # One unit now contains all ranks. Its axes are the packed dimensions, the last one first.
    axes = list(reversed(order))
    packed_mesh = members.reshape([sizes[name] for name in axes])
    mesh_axes = [axes.index(name) for name in DIMENSIONS if name in axes]
    mesh = np.transpose(packed_mesh, mesh_axes).reshape([sizes[name] for name in DIMENSIONS])
    return _assessed(tiers, mesh, sizes["ep"], order, traffic)


def _assessed(
    tiers: Tiers, mesh: np.ndarray, ep: int, packed: tuple[str, ...], traffic: Mapping[str, Traffic]
) -> Placement:
    sizes = {**dict(zip(DIMENSIONS, mesh.shape, strict=True)), "ep": ep}
    costs = {
        name: dimension_cost(tiers, groups_of(mesh, name, ep), traffic[name])
        for name, size in sizes.items()
        if size > 1
    }
    return Placement(mesh, packed, costs, tuple(_compromises(tiers, costs)))


def _home(tiers: Tiers) -> int:
    """Return the number of the tier that tp and ep groups should not cross: the NVLink clique, else the node."""
    return next((tiers.names.index(name) for name in ("clique", "node") if name in tiers.names), 0)


def _compromises(tiers: Tiers, costs: Mapping[str, DimensionCost]) -> Iterator[str]:
    home = _home(tiers)
    for name, cost in costs.items():
        outside = sum(cost.groups_at[home + 1 :])
        if name in ("tp", "ep") and outside:
            yield (
                f"{outside} of {cost.groups} {name} groups of {cost.size} cross a {tiers.names[home]} "
                f"({_listed(tiers.sizes(tiers.names[home]))} ranks) and communicate within a {tiers.names[cost.worst]}"
            )
        elif cost.groups_at[cost.worst] < cost.groups and cost.worst > home:
            yield (
                f"{cost.groups_at[cost.worst]} of {cost.groups} {name} groups of {cost.size} communicate within a "
                f"{tiers.names[cost.worst]}, the others within a finer tier"
            )


def _checked(tiers: Tiers, sizes: Mapping[str, int]) -> dict[str, int]:
    full = {name: sizes.get(name, 1) for name in (*DIMENSIONS, "ep")}
    count = prod(full[name] for name in DIMENSIONS)
    if count != tiers.size:
        factors = " x ".join(f"{name} {full[name]}" for name in DIMENSIONS if full[name] > 1) or "one rank"
        raise ToolkitError(
            f"expected a mesh of {tiers.size} ranks, got {factors} = {count}",
            where="parallel",
            fix=_choices(tiers, full),
        )
    if full["shard"] * full["cp"] % full["ep"]:
        raise ToolkitError(
            f"shard x cp = {full['shard'] * full['cp']} is not divisible by ep = {full['ep']}",
            where="parallel.ep",
            fix=_choices(tiers, full),
        )
    return full


def _choices(tiers: Tiers, requested: Mapping[str, int]) -> str:
    """Return a fix with the settings of the nearest valid meshes."""
    meshes = nearest_meshes(tiers.size, requested, lambda mesh: _divides_nodes(tiers, mesh["tp"]))
    return f"set {', or '.join(settings_of(mesh, requested) for mesh in meshes)}"


def _boundary(tiers: Tiers) -> str:
    """Return the coarser of the tiers clique and node: tp groups that fit into one of its groups must not cross two."""
    return next((name for name in reversed(tiers.names) if name in ("clique", "node")), "")


def _divides_nodes(tiers: Tiers, size: int) -> bool:
    """Return whether no tp group of this size that fits into a node (or a multi-node clique) has to cross two."""
    counts = tiers.sizes(_boundary(tiers))
    return size == 1 or not counts or size > max(counts) or all(count % size == 0 for count in counts)


def _check_tensor_parallel(tiers: Tiers, sizes: Mapping[str, int]) -> None:
    if _divides_nodes(tiers, sizes["tp"]):
        return
    boundary, size = _boundary(tiers), sizes["tp"]
    counts = tiers.sizes(boundary)
    fix = _choices(tiers, sizes)
    if boundary == "node" and len(counts) == 1 and (divisible := counts[0] - counts[0] % size):
        ranks = tiers.size // counts[0] * divisible
        others = prod(sizes[name] for name in DIMENSIONS if name != "replicate")
        if ranks % others == 0:
            fix += f"; or request {divisible} ranks per node and set replicate = {ranks // others}"
    raise ToolkitError(
        f"{_listed(counts)} ranks per {boundary} are not divisible by tp = {size}, so tp groups would cross {boundary}s",
        where="parallel.tp",
        fix=fix,
    )


def _listed(numbers: object) -> str:
    return " or ".join(map(str, numbers)) or "no"  # type: ignore[call-overload]

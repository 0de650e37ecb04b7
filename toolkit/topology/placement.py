"""Lays a mesh of ranks on the tiers of a cluster: which rank stands where, and what that costs.

The mesh has the dimensions pp, replicate, shard, cp and tp. Tensor parallel ranks talk most, in every layer, so they
are packed first, into NVLink cliques; the order in which the other dimensions are packed is tried in every way, and
the cheapest by `traffic` is taken. Expert parallel groups are stretches of shard x cp, and count in the costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

import numpy as np

from toolkit.errors import ToolkitError
from toolkit.topology.mesh_choices import nearest_meshes, spelled
from toolkit.topology.packing import pack
from toolkit.topology.tiers import Tiers
from toolkit.topology.traffic import DimensionCost, Traffic, dimension_cost

DIMENSIONS = ("pp", "replicate", "shard", "cp", "tp")  # from the outermost, as in the mesh
_PACKED_FIRST = ("tp", "cp", "shard", "replicate", "pp")

_NOMINAL_BYTES = 1e9


def nominal_traffic(sizes: Mapping[str, int]) -> dict[str, Traffic]:
    """What a step of a transformer exchanges for each dimension when nobody says it, by the bytes of a rank's parameters.

    tp all-reduces activations four times a layer, ep sends tokens to experts and back, twice, shard gathers parameters
    twice and scatters gradients, replicate all-reduces the gradients that sharding leaves, pp sends activations on. Of a
    model whose shape is known `model_traffic` says it, with the sources of the formulas.
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

    `mesh` holds ranks, its axes are `DIMENSIONS`; `packed` names the dimensions of more than one rank in the order in
    which they were packed, none where ranks stand as they were launched. `compromises` say in words what does not lie
    as it should.
    """

    mesh: np.ndarray
    packed: tuple[str, ...]
    costs: Mapping[str, DimensionCost]
    compromises: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step's exchanges, one dimension after the other."""
        return sum(cost.seconds for cost in self.costs.values())


def place(tiers: Tiers, sizes: Mapping[str, int], traffic: Mapping[str, Traffic] | None = None) -> Placement:
    """The cheapest placement of a mesh.

    Args:
        sizes: ranks of each dimension, 1 for those that are not named.
        traffic: of each dimension, nominal when it is not given.

    Raises:
        ToolkitError: the mesh does not fill the ranks; tensor parallel groups of a size that fits in a node would
            cross nodes.
    """
    full = _checked(tiers, sizes)
    _check_tensor_parallel(tiers, full)
    traffic = traffic or nominal_traffic(full)
    # Of equally cheap ones the first: ranks stay as they were launched, or the usual order of dimensions.
    candidates = [
        as_launched(tiers, sizes, traffic),
        *(_placed(tiers, full, order, traffic) for order in _orders(full)),
    ]
    return min(candidates, key=lambda placement: round(placement.seconds, 12))


def as_launched(tiers: Tiers, sizes: Mapping[str, int], traffic: Mapping[str, Traffic] | None = None) -> Placement:
    """The mesh with ranks as the launcher numbered them, which is what torch's `init_device_mesh` takes."""
    full = _checked(tiers, sizes)
    mesh = np.arange(tiers.size).reshape([full[name] for name in DIMENSIONS])
    return _assessed(tiers, mesh, full["ep"], (), traffic or nominal_traffic(full))


def groups_of(mesh: np.ndarray, dimensions: str | Sequence[str], ep: int = 1) -> np.ndarray:
    """The groups of one dimension, of several as one, or of "ep": (groups, members) of ranks in the mesh's order."""
    if dimensions == "ep":
        return groups_of(mesh, ("shard", "cp")).reshape(-1, ep)
    named = (dimensions,) if isinstance(dimensions, str) else tuple(dimensions)
    axes = [DIMENSIONS.index(name) for name in named]
    assert axes == sorted(axes), f"{named} in the order of {DIMENSIONS}"
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
    members = np.arange(tiers.size)[:, None]  # (units, ranks of a unit), the dimension packed last varies slowest
    for name in order:
        groups, places = pack(places, sizes[name])
        members = members[groups].reshape(len(groups), -1)
    # Now one unit holds all ranks, its axes the dimensions from the one packed last to the one packed first.
    shape = [sizes[name] for name in reversed(order)]
    axes = list(reversed(order))
    by_name = members.reshape(shape)
    wanted = [axes.index(name) for name in DIMENSIONS if name in axes]
    mesh = np.transpose(by_name, wanted).reshape([sizes[name] for name in DIMENSIONS])
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
    """The tier that tensor and expert parallel groups should not leave: the NVLink clique, else the node."""
    return next((tiers.names.index(name) for name in ("clique", "node") if name in tiers.names), 0)


def _compromises(tiers: Tiers, costs: Mapping[str, DimensionCost]) -> Iterator[str]:
    home = _home(tiers)
    for name, cost in costs.items():
        outside = sum(cost.groups_at[home + 1 :])
        if name in ("tp", "ep") and outside:
            yield (
                f"{outside} of {cost.groups} {name} groups of {cost.size} leave their {tiers.names[home]} "
                f"({_listed(tiers.sizes(tiers.names[home]))} ranks) and meet in one {tiers.names[cost.worst]}"
            )
        elif cost.groups_at[cost.worst] < cost.groups and cost.worst > home:
            yield (
                f"{cost.groups_at[cost.worst]} of {cost.groups} {name} groups of {cost.size} meet only in one "
                f"{tiers.names[cost.worst]}, the others in a finer tier"
            )


def _checked(tiers: Tiers, sizes: Mapping[str, int]) -> dict[str, int]:
    full = {name: sizes.get(name, 1) for name in (*DIMENSIONS, "ep")}
    asked = prod(full[name] for name in DIMENSIONS)
    if asked != tiers.size:
        spelled_out = " x ".join(f"{name} {full[name]}" for name in DIMENSIONS if full[name] > 1) or "one rank"
        raise ToolkitError(
            f"{spelled_out} is {asked} ranks, and there are {tiers.size}", where="parallel", fix=_choices(tiers, full)
        )
    if full["shard"] * full["cp"] % full["ep"]:
        raise ToolkitError(
            f"ep = {full['ep']} does not divide shard x cp = {full['shard'] * full['cp']}",
            where="parallel.ep",
            fix=_choices(tiers, full),
        )
    return full


def _choices(tiers: Tiers, asked: Mapping[str, int]) -> str:
    """The nearest meshes that are accepted."""
    found = nearest_meshes(tiers.size, asked, lambda mesh: _keeps_to_nodes(tiers, mesh["tp"]))
    return f"set {', or '.join(spelled(mesh, asked) for mesh in found)}"


def _around(tiers: Tiers) -> str:
    """The coarser tier of cliques and nodes, which tensor parallel groups that fit into it must not cross."""
    return next((name for name in reversed(tiers.names) if name in ("clique", "node")), "")


def _keeps_to_nodes(tiers: Tiers, size: int) -> bool:
    """False for groups that would fit into a node, or a clique of nodes, and do not fill it evenly: some cross it."""
    counts = tiers.sizes(_around(tiers))
    return size == 1 or not counts or size > max(counts) or all(count % size == 0 for count in counts)


def _check_tensor_parallel(tiers: Tiers, sizes: Mapping[str, int]) -> None:
    if _keeps_to_nodes(tiers, sizes["tp"]):
        return
    around, size = _around(tiers), sizes["tp"]
    counts = tiers.sizes(around)
    fix = _choices(tiers, sizes)
    if around == "node" and len(counts) == 1 and (evened := counts[0] - counts[0] % size):
        ranks, others = (
            tiers.size // counts[0] * evened,
            prod(sizes[name] for name in DIMENSIONS if name != "replicate"),
        )
        if ranks % others == 0:
            fix += f"; or ask for {evened} ranks a node and set replicate = {ranks // others}"
    raise ToolkitError(
        f"tp = {size} does not divide the {_listed(counts)} ranks of a {around}: groups would cross it in every layer",
        where="parallel.tp",
        fix=fix,
    )


def _listed(numbers: object) -> str:
    return " or ".join(map(str, numbers)) or "no"  # type: ignore[call-overload]

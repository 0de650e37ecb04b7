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
    _check_tensor_parallel(tiers, full["tp"])
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
    _check_product(tiers, {name: full[name] for name in DIMENSIONS})
    if full["shard"] * full["cp"] % full["ep"]:
        raise ToolkitError(
            f"ep = {full['ep']} does not divide shard x cp = {full['shard'] * full['cp']}",
            where="parallel.ep",
            fix="give a divisor of it",
        )
    return full


def _check_product(tiers: Tiers, sizes: Mapping[str, int]) -> None:
    asked = prod(sizes.values())
    if asked != tiers.size:
        spelled = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
        others = asked // sizes["replicate"]
        nearest = max(1, tiers.size // others)
        fix = (
            f"replicate = {nearest} fills {nearest * others} ranks"
            if nearest * others == tiers.size
            else f"ask for {nearest * others} ranks, or change the dimensions"
        )
        raise ToolkitError(f"{spelled} is {asked} ranks, and there are {tiers.size}", where="parallel", fix=fix)


def _check_tensor_parallel(tiers: Tiers, size: int) -> None:
    """Groups that would fit into a node, or a clique of nodes, and do not fill it evenly: some would cross it."""
    around = [name for name in tiers.names if name in ("clique", "node")]
    if size == 1 or not around:
        return
    counts = tiers.sizes(around[-1])
    if size > max(counts) or all(count % size == 0 for count in counts):
        return
    within = (*counts, *tiers.sizes(around[0]))
    fitting = [n for n in range(1, max(counts) + 1) if all(count % n == 0 for count in within)]
    evened = sorted({count - count % size for count in counts} - {0})
    raise ToolkitError(
        f"tp = {size} does not divide the {_listed(counts)} ranks of a {around[-1]}: "
        "groups would cross it in every layer",
        where="parallel.tp",
        fix=f"set tp = {min(fitting, key=lambda n: abs(n - size))}, or ask for {_listed(evened)} ranks a {around[-1]}",
    )


def _listed(numbers: object) -> str:
    return " or ".join(map(str, numbers)) or "no"  # type: ignore[call-overload]

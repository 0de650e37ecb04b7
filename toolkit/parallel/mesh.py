"""The mesh of a job as torch's DeviceMesh: its ranks where the topology wants them, its process groups in that order.

torch's own meshes number the ranks of a group upward, whatever the mesh says (`new_group` sorts them), while DTensor
takes a rank's place in the mesh for its number in the group: on a mesh in another order it would put pieces where they do
not belong. So the groups are made here, in the mesh's order, and torch is given them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.parallel.rank_order import order_ranks
from toolkit.topology.facts import Topology
from toolkit.topology.placement import DIMENSIONS, Placement, groups_of
from toolkit.topology.traffic import Traffic
from toolkit.world.facts import World

# torch 2.13 can leave the ranks of a group in the order that it is given, 2.11 cannot.
_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


def make_mesh(
    world: World, config: ResolvedJob, topology: Topology, traffic: Mapping[str, Traffic] | None = None
) -> Mesh:
    """Lay the job's mesh (`[parallel]`) on its ranks; rank 0 says on stderr how they lie, and why. Collective.

    Args:
        topology: what `gather_topology(world)` gave, the same on every rank.
        traffic: what each dimension exchanges in a step, from `model_traffic`. Nominal when it is not given: the mesh
            comes before the model.

    Raises:
        ToolkitError: the mesh does not fill the ranks, or tensor parallel groups would cross nodes.
    """
    assert topology.size == world.size, f"a topology of {topology.size} ranks, and there are {world.size}"
    order = order_ranks(config.parallel, topology, traffic, keeps_order=_KEEPS_ORDER)
    if world.rank == 0:
        sys.stderr.write(order.line + "\n")
    ep = config.parallel.ep
    return Mesh(world, order.placement, ep, timeout_s=float(config.restart.collective_timeout_s))


class Mesh:
    """A rank's view of the mesh: pp x replicate x shard x cp x tp, without the dimensions of one rank.

    `device_mesh` is for torch; a lone rank has `replicate` alone. `sizes` are the ranks of each dimension and of `ep`,
    `place` is this rank's place in each dimension.
    """

    def __init__(self, world: World, placement: Placement, ep: int, timeout_s: float) -> None:
        """Make the process groups of all dimensions. Collective; ranks wait `timeout_s` in the groups' collectives."""
        self.placement = placement
        self.sizes = {**dict(zip(DIMENSIONS, placement.mesh.shape, strict=True)), "ep": ep}
        self.place = dict(zip(DIMENSIONS, (int(at) for (at,) in np.nonzero(placement.mesh == world.rank)), strict=True))
        self._rank = world.rank
        self._device_type = torch.device(world.device).type
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
        self.device_mesh = self._device_mesh([(name,) for name in DIMENSIONS])

    @property
    def data_size(self) -> int:
        """Into how many shares a batch is split: the ranks of replicate x shard."""
        return self.sizes["replicate"] * self.sizes["shard"]

    @property
    def data_rank(self) -> int:
        """Which of these shares this rank takes; the same for the ranks that hold parts of one sample's model."""
        return self.place["replicate"] * self.sizes["shard"] + self.place["shard"]

    def among(self, *dimensions: str) -> DeviceMesh | None:
        """The part of `device_mesh` with those of these dimensions that have several ranks; None where none has."""
        _check_names(dimensions)
        wanted = tuple(name for name in dimensions if name in (self.device_mesh.mesh_dim_names or ()))
        return self.device_mesh[wanted] if wanted else None

    def group(self, *dimensions: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in these dimensions alone, or in "ep"; None where it is the only one.

        The group's ranks follow the mesh, the last dimension the fastest. Collective the first time that several
        dimensions, or "ep", are asked for; then all ranks ask in the same order.
        """
        if dimensions != ("ep",):
            _check_names(dimensions)
            dimensions = tuple(name for name in dimensions if self.sizes[name] > 1)
        if dimensions not in self._groups:
            self._groups[dimensions] = self._make_group(dimensions)
        return self._groups[dimensions]

    def merged(self, *dimensions: str) -> DeviceMesh:
        """The whole mesh with neighbouring dimensions as one: "shard", "cp" as "shard_cp". Collective.

        It is what `_flatten` of torch's meshes does, with groups in the mesh's order.
        """
        _check_names(dimensions)
        first, last = DIMENSIONS.index(dimensions[0]), DIMENSIONS.index(dimensions[-1])
        _check_names(dimensions, DIMENSIONS[first : last + 1])
        before, after = DIMENSIONS[:first], DIMENSIONS[last + 1 :]
        return self._device_mesh([*((name,) for name in before), dimensions, *((name,) for name in after)])

    def _device_mesh(self, axes: Sequence[tuple[str, ...]]) -> DeviceMesh:
        counts = [prod(self.sizes[name] for name in axis) for axis in axes]
        kept = [axis for axis, count in zip(axes, counts, strict=True) if count > 1] or [("replicate",)]
        groups = [self.group(*axis) or _everybody() for axis in kept]  # a lone rank is everybody
        ranks = torch.from_numpy(self.placement.mesh).reshape([count for count in counts if count > 1] or [1])
        return DeviceMesh.from_group(
            groups, self._device_type, ranks, mesh_dim_names=tuple("_".join(axis) for axis in kept)
        )

    def _make_group(self, dimensions: tuple[str, ...]) -> dist.ProcessGroup | None:
        name = "_".join(dimensions)
        groups = groups_of(self.placement.mesh, name if name == "ep" else dimensions, self.sizes["ep"])
        if groups.shape[1] == 1:
            return None
        if np.array_equal(groups, np.arange(groups.size)[None]):
            return _everybody()
        own = None
        for ranks in groups.tolist():  # torch wants all ranks to make all groups
            keep: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
            made = dist.new_group(ranks, timeout=self._timeout, group_desc=f"mesh_{name}", **keep)
            if self._rank in ranks:
                own = made
        return own


def _check_names(asked: tuple[str, ...], wanted: tuple[str, ...] = ()) -> None:
    right = wanted or tuple(name for name in DIMENSIONS if name in asked)
    if asked != right:
        raise ToolkitError(
            f"the mesh has no {', '.join(map(repr, asked))}",
            where="mesh",
            fix=f"request {', '.join(map(repr, right or DIMENSIONS))}, each once and in this order",
        )


def _everybody() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "the default process group is there before a mesh is"
    return group

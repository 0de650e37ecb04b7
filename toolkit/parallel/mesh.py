"""The mesh of a job as a torch DeviceMesh: ranks placed by topology, with process groups in mesh order.

torch's meshes sort the ranks of a group (`new_group`), but DTensor uses a rank's position in the mesh as its index in
the group. On a mesh in another order, shards would be misplaced. Therefore the groups are created here, in mesh order,
and passed to torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.parallel.rank_order import order_ranks
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.terminal.talk import say_beside
from toolkit.topology.facts import Topology
from toolkit.topology.placement import DIMENSIONS, Placement, groups_of
from toolkit.topology.traffic import Traffic
from toolkit.world.facts import World

__all__ = ["Mesh", "make_mesh"]

# torch 2.13 can keep the given order of the ranks in a group, torch 2.11 cannot.
_OF_EXPERTS = (("ep",), ("expert_shard",))  # dimensions that divide shard x cp
_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


def make_mesh(
    world: World, config: ResolvedJob, topology: Topology, traffic: Mapping[str, Traffic] | None = None
) -> Mesh:
    """Place the job's mesh (`[parallel]`) on its ranks; rank 0 prints the placement and its reason. Collective.

    Args:
        topology: the result of `gather_topology(world)`, the same on every rank.
        traffic: the communication of each mesh dimension per step, from `model_traffic`; by default nominal traffic,
            because the model does not exist yet.

    Raises:
        ToolkitError: the mesh does not match the number of ranks, or tensor-parallel groups would cross nodes.
    """
    assert topology.size == world.size, f"the topology has {topology.size} ranks, the job has {world.size}"
    order = order_ranks(config.parallel, topology, traffic, keeps_order=_KEEPS_ORDER)
    if world.rank == 0:
        sys.stderr.write(order.line + "\n")
    mesh = Mesh(world, order.placement, config.parallel.ep, timeout_s=float(config.restart.collective_timeout_s))
    if world.rank == 0 and world.run_dir is not None and mesh.sizes["pp"] > 1:
        _record_stages(mesh, RunDirectory(world.run_dir).attempt(world.attempt).mesh)
    return mesh


def _record_stages(mesh: Mesh, path: Path) -> None:
    """Write the pipeline stage of each rank for the supervisor, which compares ranks only within a stage."""
    shape = mesh.placement.mesh
    stages = [int(np.argwhere(shape == rank)[0][0]) for rank in range(shape.size)]
    try:
        if path.parent.exists():  # not if ranks were started without a supervisor
            write_json(path, {"sizes": mesh.sizes, "stages": stages}, durable=False)
    except OSError as error:  # for example a full disk; the run does not depend on this file
        say_beside(f"cannot write {path}: {error.strerror}")


class Mesh:
    """A rank's view of the mesh: pp x replicate x shard x cp x tp.

    `device_mesh` is for torch and lacks dimensions of size 1, except `replicate` if there is a single rank. `sizes` has
    the size of each dimension and of `ep`; `place` is the rank's index in each dimension.
    """

    def __init__(self, world: World, placement: Placement, ep: int, timeout_s: float) -> None:
        """Create the process groups of all dimensions, whose collectives time out after `timeout_s`. Collective."""
        self.placement = placement
        self.sizes = {**dict(zip(DIMENSIONS, placement.mesh.shape, strict=True)), "ep": ep}
        self.place = dict(zip(DIMENSIONS, (int(at) for (at,) in np.nonzero(placement.mesh == world.rank)), strict=True))
        self._rank = world.rank
        self._device_type = torch.device(world.device).type
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
        self.device_mesh = self._device_mesh([(name,) for name in DIMENSIONS])
        self._parameter_mesh = self.device_mesh if self.sizes["cp"] == 1 else self.merged(*self._copies)

    @property
    def _copies(self) -> tuple[str, ...]:
        """The dimension over which parameters are sharded, else replicated, with "cp", whose ranks share parameters."""
        return ("shard", "cp") if self.sizes["shard"] > 1 else ("replicate", "shard", "cp")

    @property
    def gradient_size(self) -> int:
        """The number of ranks over which gradients are averaged: those of replicate x shard x cp."""
        return self.data_size * self.sizes["cp"]

    def parameter_mesh(self, *dimensions: str) -> DeviceMesh | None:
        """Return the submesh that places parameters, of "tp", or of "replicate" and "shard", which then include "cp".

        It has no dimensions of size 1; None if all have size 1.
        """
        names = self._parameter_mesh.mesh_dim_names or ()
        wanted = tuple(name for name in names if not {*name.split("_")}.isdisjoint(dimensions))
        return self._parameter_mesh[wanted] if wanted else None

    @property
    def are_copies(self) -> bool:
        """True if each rank has a whole copy of the model."""
        return all(self.sizes[name] == 1 for name in ("shard", "tp", "pp", "ep"))

    @property
    def expert_copies(self) -> int:
        """The number of ranks of shard x cp that have the same experts."""
        return self.sizes["shard"] * self.sizes["cp"] // self.sizes["ep"]

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """The mesh of experts, with "replicate", "expert_shard" and "ep", also of size 1, and "tp" if it is larger.

        The first access is collective.
        """
        axes = {"replicate": self.sizes["replicate"], "expert_shard": self.expert_copies, "ep": self.sizes["ep"]}
        names = [*(("pp",) if self.sizes["pp"] > 1 else ()), *axes, *(("tp",) if self.sizes["tp"] > 1 else ())]
        groups = [self.group(name) or self._alone() for name in names]
        shape = [{**self.sizes, **axes}[name] for name in names]
        ranks = torch.from_numpy(self.placement.mesh).reshape(shape)
        return DeviceMesh.from_group(groups, self._device_type, ranks, mesh_dim_names=tuple(names))

    @property
    def data_size(self) -> int:
        """The number of parts of a batch: the ranks of replicate x shard."""
        return self.sizes["replicate"] * self.sizes["shard"]

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of a batch; equal for ranks with parts of the same model copy."""
        return self.place["replicate"] * self.sizes["shard"] + self.place["shard"]

    def among(self, *dimensions: str) -> DeviceMesh | None:
        """Return the submesh of these dimensions, without those of size 1; None if all have size 1."""
        _check_names(dimensions)
        wanted = tuple(name for name in dimensions if name in (self.device_mesh.mesh_dim_names or ()))
        return self.device_mesh[wanted] if wanted else None

    def group(self, *dimensions: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ from this one only in these dimensions, in "ep" or in "expert_shard".

        Returns None if this rank would be alone. The ranks are in mesh order: the last dimension varies fastest. The
        first call for several dimensions, or for "ep", is collective; all ranks must make such calls in the same order.
        """
        if dimensions not in _OF_EXPERTS:
            _check_names(dimensions)
            dimensions = tuple(name for name in dimensions if self.sizes[name] > 1)
        if dimensions not in self._groups:
            self._groups[dimensions] = self._make_group(dimensions)
        return self._groups[dimensions]

    def merged(self, *dimensions: str) -> DeviceMesh:
        """Return the mesh with adjacent dimensions merged: "shard" and "cp" become "shard_cp". Collective.

        Like torch's `DeviceMesh._flatten`, but with groups in mesh order.
        """
        _check_names(dimensions)
        first, last = DIMENSIONS.index(dimensions[0]), DIMENSIONS.index(dimensions[-1])
        _check_names(dimensions, DIMENSIONS[first : last + 1])
        before, after = DIMENSIONS[:first], DIMENSIONS[last + 1 :]
        return self._device_mesh([*((name,) for name in before), dimensions, *((name,) for name in after)])

    def _device_mesh(self, axes: Sequence[tuple[str, ...]]) -> DeviceMesh:
        counts = [prod(self.sizes[name] for name in axis) for axis in axes]
        kept = [axis for axis, count in zip(axes, counts, strict=True) if count > 1] or [("replicate",)]
        groups = [self.group(*axis) or _everybody() for axis in kept]  # `group` returns None if the world has one rank
        ranks = torch.from_numpy(self.placement.mesh).reshape([count for count in counts if count > 1] or [1])
        return DeviceMesh.from_group(
            groups, self._device_type, ranks, mesh_dim_names=tuple("_".join(axis) for axis in kept)
        )

    def _alone(self) -> dist.ProcessGroup:
        """Return a group of this rank only. Collective."""
        if ("alone",) not in self._groups:
            for rank in self.placement.mesh.flatten().tolist():
                made = dist.new_group([rank], timeout=self._timeout, group_desc="mesh_alone")
                if rank == self._rank:
                    self._groups["alone",] = made
        alone = self._groups["alone",]
        assert alone is not None
        return alone

    def _make_group(self, dimensions: tuple[str, ...]) -> dist.ProcessGroup | None:
        name = "_".join(dimensions)
        groups = groups_of(self.placement.mesh, name if dimensions in _OF_EXPERTS else dimensions, self.sizes["ep"])
        if groups.shape[1] == 1:
            return None
        if np.array_equal(groups, np.arange(groups.size)[None]):
            return _everybody()
        own = None
        for ranks in groups.tolist():  # torch requires all ranks to create all groups
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
            fix=f"use {', '.join(map(repr, right or DIMENSIONS))}, each once and in this order",
        )


def _everybody() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "initialize the default process group before the mesh"
    return group

"""The CPUs that the launcher assigned to each rank of this node, by local rank."""

import os
from collections.abc import Mapping

from toolkit.world.facts import World

__all__ = ["Masks", "masks_of_node"]

_MASK_BYTES = 1024  # 8192 CPUs, the maximum that Linux supports (CONFIG_NR_CPUS)

Masks = tuple[frozenset[int] | None, ...]


def masks_of_node(world: World, environ: Mapping[str, str]) -> Masks:
    """Return the CPUs assigned to each rank of this node, None if unknown; those of this rank are always known.

    Under MPI, this is a collective of all ranks; otherwise it does not wait for other ranks.
    """
    own = frozenset(os.sched_getaffinity(0))
    if world.discovered_by.startswith("MPI") and world.size > 1:
        return _over_mpi(world, own)
    if world.local_size == 1:
        return (own,)
    if world.launcher == "srun":
        return from_slurm(own, world.local_rank, world.local_size, environ)
    return (own,) * world.local_size  # other launchers do not bind ranks: all inherit the same CPUs


def from_slurm(own: frozenset[int], local_rank: int, local_size: int, environ: Mapping[str, str]) -> Masks:
    """Return the CPUs to which srun bound each task of this node, by local rank."""
    kind = environ.get("SLURM_CPU_BIND_TYPE", "").rstrip(":")
    if kind in ("", "none"):
        return (own,) * local_size
    masks = _read_masks(environ.get("SLURM_CPU_BIND_LIST", "")) if kind == "mask_cpu" else []
    if masks and masks[local_rank % len(masks)] == own:  # srun repeats a list that is too short: srun(1), --cpu-bind
        return tuple(masks[number % len(masks)] for number in range(local_size))
    return tuple(own if number == local_rank else None for number in range(local_size))


def _read_masks(text: str) -> list[frozenset[int]]:
    try:
        return [_cpus_of(int(word, 16)) for word in text.split(",")]
    except ValueError:
        return []


def _over_mpi(world: World, own: frozenset[int]) -> Masks:
    from mpi4py import MPI

    node = MPI.COMM_WORLD.Split(world.node, world.rank)
    try:
        mine = sum(1 << cpu for cpu in own).to_bytes(_MASK_BYTES, "little")
        everybody = bytearray(_MASK_BYTES * world.local_size)
        node.Allgather(mine, everybody)
    finally:
        node.Free()
    parts = [everybody[at : at + _MASK_BYTES] for at in range(0, len(everybody), _MASK_BYTES)]
    return tuple(_cpus_of(int.from_bytes(part, "little")) for part in parts)


def _cpus_of(mask: int) -> frozenset[int]:
    return frozenset(cpu for cpu, bit in enumerate(bin(mask)[:1:-1]) if bit == "1")

"""Merge dicts of parameter names over all ranks, because each pipeline stage has other parameters."""

import hashlib
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from toolkit.world.facts import World

T = TypeVar("T")


def of_all_ranks(world: World, own: Mapping[str, T]) -> dict[str, T]:
    """Return `own` plus the entries that only other ranks have. Collective."""
    if world.size == 1:
        return dict(own)
    # Usually all ranks have the same names. Comparing eight bytes of a hash then avoids gathering the dicts.
    digest = hashlib.sha256("\n".join(sorted(own)).encode()).digest()
    mine = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)], device=world.device)
    highest, lowest = mine.clone(), mine.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    if bool(highest == lowest):
        return dict(own)
    found: list[Mapping[str, T]] = [{}] * world.size
    dist.all_gather_object(found, dict(own))
    return {name: value for of_rank in found for name, value in of_rank.items()} | dict(own)

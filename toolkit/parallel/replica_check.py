"""Check that the replicas of a model are equal to the last bit, by digests that ranks exchange.

Replicas start alike and add the same gradients, so a difference shows a fault: of memory, of a GPU, or of a program that
changes parameters on some ranks. The loss shows it late or never.
"""

import socket
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import ToolkitError
from toolkit.parallel.mesh import Mesh

__all__ = ["check_replicas", "replica_group"]

_PIECE = 1 << 20  # elements whose digest is computed at once
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def replica_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the ranks that have the same parameters as this one; None if no other rank has them."""
    has_parts = mesh.sizes["shard"] > 1 or mesh.sizes["ep"] > 1  # ranks of cp have other shards or experts
    return mesh.group("replicate") if has_parts else mesh.group("replicate", "cp")


def check_replicas(module: nn.Module, group: dist.ProcessGroup, step: int, equal_at: int = 0) -> None:
    """Compare the parameters of `module` over the replicas in `group`. Collective over all ranks of the job.

    Args:
        equal_at: the last step whose replicas were equal, or 0.

    Raises:
        ToolkitError: they differ; the message, the same on all ranks, names the first such parameter and the ranks that are not
            in the majority.
    """
    named = [(name, _local(one)) for name, one in module.named_parameters()]
    own = torch.stack([_digest(tensor) for _, tensor in named]) if named else torch.zeros(1, dtype=torch.int64)
    others = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, own, group=group)
    differs = (torch.stack(others) != own).any(0)
    anywhere = differs.any().int()  # also among other shards, whose ranks would wait for these
    dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    if anywhere:
        _refuse(named, others, differs, group, step, equal_at)


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _digest(tensor: Tensor) -> Tensor:
    """Return the sum of all elements, as integers of their bits, each times its odd place; modulo 2^64, a scalar."""
    bits = tensor.contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first, piece in enumerate(bits.split(_PIECE)):
        places = torch.arange(first * _PIECE, first * _PIECE + len(piece), device=tensor.device)
        total += (piece.long() * (2 * places + 1)).sum()
    return total


def _refuse(
    named: list[tuple[str, Tensor]], digests: list[Tensor], differs: Tensor, group: dist.ProcessGroup, step: int, equal_at: int
) -> None:  # fmt: skip
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    own = ""
    if differs.any():
        number = int(differs.nonzero()[0])
        found = [int(of_rank[number]) for of_rank in digests]
        ((usual, count), *_) = Counter(found).most_common()
        apart = [place for place, digest in enumerate(found) if digest != usual or 2 * count <= len(found)]
        ranks = [dist.get_global_rank(group, place) for place in apart]
        own = f"{named[number][0]} on {', '.join(f'rank {rank} on {hosts[rank]}' for rank in ranks)}"
    everywhere: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    earlier = f"step {equal_at} or earlier" if equal_at else "an earlier step (no check preceded)"
    raise ToolkitError(
        f"replicas differ after step {step}: {next(filter(None, everywhere))}",
        fix=f"test the memory of the faulty node, and resume without it from a checkpoint of {earlier}: `toolkit resume RUN "
        "--from STEP --set job.exclude=NODE`",
    )

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

_WHERE = "train.check_replicas_every"
_PIECE = 1 << 20  # elements whose digest is computed at once
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def replica_group(mesh: Mesh) -> dist.ProcessGroup:
    """Return the ranks that have the same parameters as this one.

    Raises:
        ToolkitError: no other rank has them.
    """
    group = mesh.group("replicate") if mesh.sizes["shard"] > 1 else mesh.group("replicate", "cp")
    if group is None:
        raise ToolkitError(
            "expected several replicas of the model, got one",
            where=_WHERE,
            fix="set it to 0, or parallel.replicate = 2",
        )
    return group


def check_replicas(module: nn.Module, group: dist.ProcessGroup, step: int) -> None:
    """Compare the parameters of `module` over the replicas in `group`. Collective.

    Raises:
        ToolkitError: they differ; the message names the first such parameter and the ranks that are not in the majority.
    """
    named = [(name, _local(one)) for name, one in module.named_parameters()]
    if not named:
        return
    own = torch.stack([_digest(tensor) for _, tensor in named])
    others = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, own, group=group)
    for number, (name, _) in enumerate(named):
        found = [int(of_rank[number]) for of_rank in others]
        if len(set(found)) > 1:
            _refuse(name, found, group, step)


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


def _refuse(name: str, found: list[int], group: dist.ProcessGroup, step: int) -> None:
    hosts: list[str | None] = [None] * len(found)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    ((usual, count), *_) = Counter(found).most_common()
    apart = [place for place, digest in enumerate(found) if digest != usual or 2 * count <= len(found)]
    ranks = ", ".join(f"rank {dist.get_global_rank(group, place)} on {hosts[place]}" for place in apart)
    raise ToolkitError(
        f"replicas differ after step {step}: {name} on {ranks}",
        where=_WHERE,
        fix="test the memory of the faulty node, and resume without it from a checkpoint of an earlier step: `toolkit resume RUN "
        "--checkpoint STEP --set job.exclude=NODE`",
    )

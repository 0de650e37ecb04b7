"""All-reduce algorithms with few large messages: flat (by the backend), direct and leader.

`direct` is also available as a reduce-scatter and an all-gather. Parts may have unequal lengths, including zero.
"""

from collections.abc import Sequence

import torch

from toolkit.comm.peers import Peers
from toolkit.comm.reductions import backend_all_reduce, fold
from toolkit.comm.ring import pipelined_ring_all_reduce
from toolkit.comm.tree import tree_broadcast


def flat_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """All-reduce with the backend: gloo's ring, or NCCL's choice. All ranks of the group must call it."""
    backend_all_reduce(data, op, peers.group)


def leader_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """All-reduce through the first rank of each node, which sums in rank order. Requires `peers.nodes`.

    Only these leaders communicate across nodes, in a ring: 2(N-1)/N S bytes leave each of N nodes for S bytes of data.
    """
    (node,) = (places for places in peers.nodes if peers.place in places)
    leader, *others = node
    if peers.place == leader:
        incoming = [torch.empty_like(data) for _ in others]
        peers.exchange(receives=zip(incoming, others, strict=True))
        for other in incoming:
            fold(data, other, op)
        pipelined_ring_all_reduce(data, op, peers.among([places[0] for places in peers.nodes]))
    else:
        peers.exchange([(data, leader)])
    tree_broadcast([data], [0], peers.among(node))


def direct_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """All-reduce S bytes over p ranks in 2 latencies: each rank sums one part and sends it to all; it sends 2(p-1)/p S."""
    parts = data.tensor_split(peers.size)
    direct_reduce_scatter(parts, op, peers)
    direct_all_gather(parts, peers)


def direct_reduce_scatter(parts: Sequence[torch.Tensor], op: str, peers: Peers) -> torch.Tensor:
    """Reduce this rank's part of `parts` over all ranks, in place and in rank order, and return it."""
    own = parts[peers.place]
    others = [place for place in range(peers.size) if place != peers.place]
    incoming = {place: torch.empty_like(own) for place in others}
    peers.exchange([(parts[place], place) for place in others], [(incoming[place], place) for place in others])
    total = incoming[0] if peers.place else own
    for place in range(1, peers.size):
        fold(total, own if place == peers.place else incoming[place], op)
    if peers.place:
        own.copy_(total)
    return own


def direct_all_gather(parts: Sequence[torch.Tensor], peers: Peers) -> None:
    """Fill `parts`, which has one part per rank, with the parts of the other ranks."""
    others = [place for place in range(peers.size) if place != peers.place]
    peers.exchange([(parts[peers.place], place) for place in others], [(parts[place], place) for place in others])

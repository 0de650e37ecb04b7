"""Binomial trees: log2(p) rounds, in each of which half of the remaining ranks send to the other half.

Places are relative to the root. Each rank adds in round order, so the result is bitwise the same regardless of
timing.
"""

from collections.abc import Sequence

import torch

from toolkit.comm.peers import Message, Peers
from toolkit.comm.reductions import fold


def tree_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """Reduce to the first rank, then broadcast: 2 log2(p) latencies, but each round moves the whole data."""
    tree_reduce(data, op, peers, root=0)
    tree_broadcast([data], [0], peers)


def tree_reduce(data: torch.Tensor, op: str, peers: Peers, root: int) -> None:
    """Reduce into `data` on the root; its contents on other ranks are undefined afterwards."""
    place = (peers.place - root) % peers.size
    distance = 1
    while distance < peers.size:
        if place & distance:
            peers.exchange([(data, (place - distance + root) % peers.size)])
            return
        if place + distance < peers.size:
            other = torch.empty_like(data)
            peers.exchange(receives=[(other, (place + distance + root) % peers.size)])
            fold(data, other, op)
        distance *= 2


def tree_broadcast(tensors: Sequence[torch.Tensor], roots: Sequence[int], peers: Peers) -> None:
    """Copy each tensor from its root to all ranks, in place. The trees of all tensors run in the same rounds."""
    distance = 1
    while distance < peers.size:
        distance *= 2
    while distance > 1:
        distance //= 2
        sends: list[Message] = []
        receives: list[Message] = []
        for tensor, root in zip(tensors, roots, strict=True):
            place = (peers.place - root) % peers.size
            if place % (2 * distance) == 0 and place + distance < peers.size:
                sends.append((tensor, (place + distance + root) % peers.size))
            elif place % (2 * distance) == distance:
                receives.append((tensor, (place - distance + root) % peers.size))
        peers.exchange(sends, receives)

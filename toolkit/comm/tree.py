"""Trees: log2(p) rounds, in which half of the ranks that are left speak to the other half.

A binomial tree on places relative to the root. What comes in is added in the order of rounds, so that the result
has the same bits however fast the ranks are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toolkit.comm.peers import Message, Peers
from toolkit.comm.reductions import fold


def tree_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """Reduce to the first rank, then broadcast: 2 log2(p) latencies, but the whole of S at every one."""
    tree_reduce(data, op, peers, root=0)
    tree_broadcast([data], [0], peers)


def tree_reduce(data: torch.Tensor, op: str, peers: Peers, root: int) -> None:
    """Reduce into `data` on the root; what it holds on other ranks is of no use afterwards."""
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
    """Bring each tensor from its root to all ranks, in place. The trees grow together, round by round."""
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

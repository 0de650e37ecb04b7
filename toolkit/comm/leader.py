"""All-reduce through one rank of every node: gather to the leader, leaders among themselves, and back.

Only leaders speak across nodes, by a ring: 2(N-1)/N S leave each node in few large messages, for any number of ranks
on each node. Inside the node all goes through one rank.
"""

from __future__ import annotations

import torch

from toolkit.comm.peers import Peers
from toolkit.comm.reductions import fold
from toolkit.comm.ring import pipelined_ring_all_reduce
from toolkit.comm.tree import tree_broadcast


def leader_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """The first rank of every node is its leader; it adds up in the order of ranks. Needs `peers.nodes`."""
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

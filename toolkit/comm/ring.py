"""All-reduce on a ring: every rank receives only from its left neighbor and sends only to its right one.

The data is split into one chunk per rank. In p-1 steps, each chunk passes all p ranks and is summed; in p-1 more steps,
the sums pass all ranks. For S bytes of data, each rank sends 2(p-1)/p S, the minimum, at the cost of 2(p-1) latencies.
After Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

Three algorithms of the table use this code with different parameters. `pieces` splits each chunk: a rank forwards a
piece as soon as it is summed, while it receives the next one. `ahead` is the number of open receive buffers.
"""

from collections.abc import Sequence

import torch

from toolkit.comm.peers import Peers
from toolkit.comm.reductions import fold

PIECE_BYTES = 256 * 1024
MOST_PIECES = 32
PIPELINE_AHEAD = 4


def ring_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """All-reduce with one piece per chunk: transfers and sums alternate."""
    _ring(data, op, peers, pieces=1, ahead=1)


def double_buffered_ring_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """All-reduce with two pieces per chunk and two buffers: a rank sums one half while it receives the other."""
    _ring(data, op, peers, pieces=2, ahead=2)


def pipelined_ring_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """All-reduce with pieces of 256 KiB, up to 32 per chunk, which are forwarded without waiting for the chunk."""
    chunk_bytes = -(-data.numel() // peers.size) * data.element_size()
    pieces = min(max(-(-chunk_bytes // PIECE_BYTES), 1), MOST_PIECES)
    _ring(data, op, peers, pieces=pieces, ahead=min(pieces, PIPELINE_AHEAD))


def _ring(data: torch.Tensor, op: str, peers: Peers, *, pieces: int, ahead: int) -> None:
    if peers.size == 1:
        return
    chunks = [chunk.tensor_split(pieces) for chunk in data.tensor_split(peers.size)]
    # A GPU has one queue for sends and receives; if they were posted ahead, they would deadlock.
    walk = _walk_ahead if data.device.type == "cpu" else _walk_in_step
    walk(_PieceOrder(chunks, peers, pieces, op), ahead)


class _PieceOrder:
    """The pieces in the order of their transfer: all pieces of a step, then those of the next."""

    def __init__(self, chunks: Sequence[Sequence[torch.Tensor]], peers: Peers, pieces: int, op: str) -> None:
        self.peers = peers
        self.pieces = pieces
        self.op = op
        self.count = 2 * (peers.size - 1) * pieces
        self.left = (peers.place - 1) % peers.size
        self.right = (peers.place + 1) % peers.size
        self._chunks = chunks

    def outgoing(self, item: int) -> torch.Tensor:
        step, piece = divmod(item, self.pieces)
        return self._chunks[(self.peers.place - step) % self.peers.size][piece]

    def incoming(self, item: int) -> torch.Tensor:
        """Return the target of a received piece: the first half of the items is added to it, the second half copied."""
        step, piece = divmod(item, self.pieces)
        return self._chunks[(self.peers.place - step - 1) % self.peers.size][piece]

    def buffer(self, item: int) -> torch.Tensor:
        is_summed = item < self.count // 2
        return torch.empty_like(self.incoming(item)) if is_summed else self.incoming(item)

    def arrived(self, item: int, buffer: torch.Tensor) -> None:
        if item < self.count // 2:
            fold(self.incoming(item), buffer, self.op)


def _walk_ahead(order: _PieceOrder, ahead: int) -> None:
    peers = order.peers
    sends = peers.post((order.outgoing(item), order.right) for item in range(order.pieces))
    buffers: dict[int, torch.Tensor] = {}
    waiting = {}
    for item in range(order.count + ahead):
        if item < order.count:
            buffers[item] = order.buffer(item)
            waiting[item] = peers.post(receives=[(buffers[item], order.left)])
        done = item - ahead
        if done < 0:
            continue
        for work in waiting.pop(done):
            work.wait()
        order.arrived(done, buffers.pop(done))
        if done + order.pieces < order.count:
            sends += peers.post([(order.outgoing(done + order.pieces), order.right)])
    for work in sends:
        work.wait()


def _walk_in_step(order: _PieceOrder, _ahead: int) -> None:
    for item in range(order.count):
        buffer = order.buffer(item)
        order.peers.exchange([(order.outgoing(item), order.right)], [(buffer, order.left)])
        order.arrived(item, buffer)

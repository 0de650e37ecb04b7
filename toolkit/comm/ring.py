"""All-reduce round a ring: every rank hears only from its left neighbour and speaks only to its right one.

The data is cut into one chunk a rank. In p-1 steps each chunk goes round once and is added up on its way, in p-1
more the sums go round. Each rank sends 2(p-1)/p S, the least that is possible, at the price of 2(p-1) latencies.
After Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

Three names of the table are this one algorithm with other parameters. `pieces` cuts each chunk, and a piece is sent to
the right as soon as it is there: the next one comes in while it is added up and sent. `ahead` is how many
receive buffers are open at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toolkit.comm.peers import Peers
from toolkit.comm.reductions import fold

PIECE_BYTES = 256 * 1024
MOST_PIECES = 32
PIPELINE_AHEAD = 4


def ring_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """One piece a chunk: communication and addition take turns."""
    _ring(data, op, peers, pieces=1, ahead=1)


def double_buffered_ring_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """Two halves a chunk and two buffers: one half is added up while the other comes in."""
    _ring(data, op, peers, pieces=2, ahead=2)


def pipelined_ring_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """Pieces of 256 KiB, up to 32 a chunk, flow through all steps without waiting for the rest of their chunk."""
    chunk_bytes = -(-data.numel() // peers.size) * data.element_size()
    pieces = min(max(-(-chunk_bytes // PIECE_BYTES), 1), MOST_PIECES)
    _ring(data, op, peers, pieces=pieces, ahead=min(pieces, PIPELINE_AHEAD))


def _ring(data: torch.Tensor, op: str, peers: Peers, *, pieces: int, ahead: int) -> None:
    if peers.size == 1:
        return
    chunks = [chunk.tensor_split(pieces) for chunk in data.tensor_split(peers.size)]
    # A GPU's sends and receives share one queue: posted ahead, they would deadlock.
    walk = _walk_ahead if data.device.type == "cpu" else _walk_in_step
    walk(_Itinerary(chunks, peers, pieces, op), ahead)


class _Itinerary:
    """The pieces in the order in which they come and go: all pieces of a step, then those of the next."""

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
        """The place of what comes in: it is added there, or in the second half of the way, put there."""
        step, piece = divmod(item, self.pieces)
        return self._chunks[(self.peers.place - step - 1) % self.peers.size][piece]

    def buffer(self, item: int) -> torch.Tensor:
        adds_up = item < self.count // 2
        return torch.empty_like(self.incoming(item)) if adds_up else self.incoming(item)

    def arrived(self, item: int, buffer: torch.Tensor) -> None:
        if item < self.count // 2:
            fold(self.incoming(item), buffer, self.op)


def _walk_ahead(way: _Itinerary, ahead: int) -> None:
    peers = way.peers
    sends = peers.post((way.outgoing(item), way.right) for item in range(way.pieces))
    buffers: dict[int, torch.Tensor] = {}
    waiting = {}
    for item in range(way.count + ahead):
        if item < way.count:
            buffers[item] = way.buffer(item)
            waiting[item] = peers.post(receives=[(buffers[item], way.left)])
        done = item - ahead
        if done < 0:
            continue
        for work in waiting.pop(done):
            work.wait()
        way.arrived(done, buffers.pop(done))
        if done + way.pieces < way.count:
            sends += peers.post([(way.outgoing(done + way.pieces), way.right)])
    for work in sends:
        work.wait()


def _walk_in_step(way: _Itinerary, _ahead: int) -> None:
    for item in range(way.count):
        buffer = way.buffer(item)
        way.peers.exchange([(way.outgoing(item), way.right)], [(buffer, way.left)])
        way.arrived(item, buffer)

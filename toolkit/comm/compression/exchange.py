"""The exchanges of messages between ranks. All ranks get the same bits, because they decode the same messages in one order."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.comm.compat import all_gather_single
from toolkit.comm.compression.compressor import Compressor
from toolkit.comm.peers import Peers
from toolkit.comm.reductions import backend_all_reduce


@dataclass(frozen=True)
class Exchanged:
    """The mean over all ranks, and the numbers that other ranks decode from the messages of this one.

    `lost` is the range of numbers that this rank averaged for all in two phases, and what the second message lost there.
    """

    mean: Tensor
    own: Tensor
    lost: tuple[slice, Tensor] | None = None


@dataclass(frozen=True)
class Seeds:
    """Random seeds of one exchange: `shared` is equal on all ranks, `first` and `second` differ between ranks."""

    shared: int
    first: int
    second: int


def exchange(x: Tensor, compressor: Compressor, peers: Peers, seeds: Seeds, before: Tensor | None = None) -> Exchanged:
    """Average x, fp32 of shape (n,), over the ranks. Collective.

    Args:
        before: for two phases, numbers of shape (n,) that this rank adds to the mean of its range.
    """
    if compressor.exchange == "sum":
        return _sum(x, compressor, peers, seeds.shared)
    if compressor.exchange == "gather":
        return _gather(x, compressor, peers, seeds.first)
    return _two_phase(x, compressor, peers, seeds, before)


def owned_range(n: int, block: int, peers: Peers) -> slice:
    """Return the range of n numbers that this rank averages in two phases."""
    length = part_length(n, block, peers.size)
    return slice(min(n, peers.place * length), min(n, (peers.place + 1) * length))


def part_length(n: int, block: int, ranks: int) -> int:
    """Return the numbers per rank in two phases: whole blocks, the same on all ranks."""
    return -(-n // (ranks * block)) * block


def sent_bytes(n: int, compressor: Compressor, ranks: int) -> float:
    """Return the bytes that a rank sends to average n numbers; the backend's sums are rings."""
    if compressor.exchange == "sum":
        return 2 * (ranks - 1) / ranks * compressor.wire_bytes(n)
    if compressor.exchange == "gather":
        return (ranks - 1) * compressor.wire_bytes(n)
    return 2 * (ranks - 1) * compressor.wire_bytes(part_length(n, compressor.block, ranks))


def _sum(x: Tensor, compressor: Compressor, peers: Peers, seed: int) -> Exchanged:
    message = compressor.encode(x[None] / peers.size, seed)
    own = compressor.decode(message, len(x), seed)[0] * peers.size
    if message.numel():
        backend_all_reduce(message, "sum", peers.group)
    return Exchanged(compressor.decode(message, len(x), seed)[0], own)


def _two_phase(x: Tensor, compressor: Compressor, peers: Peers, seeds: Seeds, before: Tensor | None) -> Exchanged:
    ranks, n = peers.size, len(x)
    length = part_length(n, compressor.block, ranks)
    rows = torch.nn.functional.pad(x, (0, ranks * length - n)).view(ranks, length)
    sent = compressor.encode(rows, seeds.first)
    own = compressor.decode(sent, length, seeds.first).view(-1)[:n]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=peers.group)
    part = compressor.decode(received, length, seeds.first).sum(0).div_(ranks)
    owned = owned_range(n, compressor.block, peers)
    if before is not None:
        part[: owned.stop - owned.start] += before[owned]
    message = compressor.encode(part[None], seeds.second)
    gathered = _all_gathered(message, peers)
    # The owner, too, decodes the message, so that it has the bits of the other ranks.
    mean = compressor.decode(gathered, length, seeds.second).view(-1)[:n]
    return Exchanged(mean, own, (owned, part[: owned.stop - owned.start] - mean[owned]))


def _gather(x: Tensor, compressor: Compressor, peers: Peers, seed: int) -> Exchanged:
    message = compressor.encode(x[None], seed)
    lengths = torch.tensor([[message.shape[1]]], device=x.device)
    counts = _all_gathered(lengths, peers)[:, 0].tolist()  # of algorithms whose messages depend on the numbers
    padded = torch.nn.functional.pad(message, (0, max(counts) - message.shape[1]))
    gathered = _all_gathered(padded, peers)
    total = torch.zeros_like(x)
    for place, count in enumerate(counts):
        total += compressor.decode(gathered[place : place + 1, :count], len(x), seed)[0]
    return Exchanged(total.div_(peers.size), compressor.decode(message, len(x), seed)[0])


def _all_gathered(row: Tensor, peers: Peers) -> Tensor:
    """Return the rows of all ranks, (1, n) each, as (ranks, n)."""
    rows = row.new_empty(peers.size, row.shape[1])
    if row.numel():
        all_gather_single(rows, row, group=peers.group)
    return rows

"""The exchanges of messages between ranks. All ranks get the same bits, because they decode the same messages in one order."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.comm.compat import all_gather_single
from toolkit.comm.compression.compressor import Compressor
from toolkit.comm.peers import Peers
from toolkit.comm.reductions import backend_all_reduce

__all__ = ["reduce_scatter"]

Wire = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Exchanged:
    """The mean over all ranks, and the numbers that other ranks decode from the messages of this one.

    `lost` is the range of numbers that this rank averaged for all in two phases, and what the second message lost there.
    """

    mean: Tensor
    own: Tensor
    lost: tuple[slice, Tensor] | None = None


def exchange(
    x: Tensor, compressor: Compressor, peers: Peers, seed: int, before: Tensor | None = None, wire: Wire = nullcontext
) -> Exchanged:  # fmt: skip
    """Average x, fp32 of shape (n,), over the ranks. Collective.

    Args:
        seed: the same on all ranks; ranks that encode for themselves add their number to it.
        before: for two phases, numbers of shape (n,) that this rank adds to the mean of its range.
        wire: returns a context for each transfer of two phases, to time them.
    """
    if compressor.exchange == "sum":
        return _sum(x, compressor, peers, seed)
    if compressor.exchange == "gather":
        return _gather(x, compressor, peers, seed + peers.place)
    return _two_phase(x, compressor, peers, seed + peers.place, before, wire)


def sent_bytes(n: int, compressor: Compressor, ranks: int) -> float:
    """Return the bytes that a rank sends to average n numbers; the backend's sums are rings."""
    if compressor.exchange == "sum":
        return 2 * (ranks - 1) / ranks * compressor.wire_bytes(n)
    if compressor.exchange == "gather":
        return (ranks - 1) * compressor.wire_bytes(n)
    return 2 * (ranks - 1) * compressor.wire_bytes(_part_length(n, compressor.block, ranks))


def _part_length(n: int, block: int, ranks: int) -> int:
    """Return the numbers per rank in two phases: whole blocks, the same on all ranks."""
    return -(-n // (ranks * block)) * block


def _sum(x: Tensor, compressor: Compressor, peers: Peers, seed: int) -> Exchanged:
    message = compressor.encode(x[None] / peers.size, seed)
    own = compressor.decode(message, len(x), seed)[0] * peers.size
    if message.numel():
        backend_all_reduce(message, "sum", peers.group)
    return Exchanged(compressor.decode(message, len(x), seed)[0], own)


def _two_phase(
    x: Tensor, compressor: Compressor, peers: Peers, seed: int, before: Tensor | None, wire: Wire
) -> Exchanged:
    ranks, n = peers.size, len(x)
    length = _part_length(n, compressor.block, ranks)
    owned = slice(min(n, peers.place * length), min(n, (peers.place + 1) * length))
    rows = torch.nn.functional.pad(x, (0, ranks * length - n)).view(ranks, length)
    sent = compressor.encode(rows, seed)
    own = compressor.decode(sent, length, seed).view(-1)[:n]
    received = torch.empty_like(sent)
    with wire():
        dist.all_to_all_single(received, sent, group=peers.group)
    part = compressor.decode(received, length, seed).sum(0).div_(ranks)
    if before is not None:
        part[: owned.stop - owned.start] += before[owned]
    again = compressor.encode(part[None], seed + ranks)
    with wire():
        gathered = _all_gathered(again, peers)
    # The owner, too, decodes the message, so that it has the bits of the other ranks.
    mean = compressor.decode(gathered, length, seed).view(-1)[:n]
    return Exchanged(mean, own, (owned, part[: owned.stop - owned.start] - mean[owned]))


def reduce_scatter(rows: Tensor, compressor: Compressor, group: dist.ProcessGroup, seed: int) -> Tensor:
    """Return the sum over the ranks of the row for this rank: the first of two phases. Collective.

    Args:
        rows: one for each rank, fp32 of shape (ranks, n). One number that is not finite makes all sums NaN.
    """
    n = rows.shape[1]
    padded = torch.nn.functional.pad(rows + rows.sum() * 0, (0, -n % compressor.block))
    sent = compressor.encode(padded, seed + group.rank())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return compressor.decode(received, padded.shape[1], seed).sum(0)[:n]


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

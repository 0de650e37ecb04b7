"""The exchanges of messages between ranks. All ranks get the same bits, because they decode the same messages in one order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.comm.compat import all_gather_single
from toolkit.comm.compression.compressor import Compressor
from toolkit.comm.compression.spent import NODE, WIRE, Spent
from toolkit.comm.hierarchical import node_reduce_scatter
from toolkit.comm.peers import Peers
from toolkit.comm.reductions import backend_all_reduce

__all__ = ["reduce_scatter"]

_SEGMENT = 1 << 19  # numbers of all ranks, at least; at 100 Mbit/s their int8 messages take 40 ms
_SEGMENTS = 8  # of an exchange, at most, so that latency does not grow with its size
_AHEAD = 2  # segments whose first phase has begun before the second phase of the oldest one; gloo has two threads


@dataclass(frozen=True)
class Exchanged:
    """The mean over all ranks.

    `own` are the numbers that other ranks decode from the messages of this one; None if they are not wanted. `lost` is the range of numbers that this rank averaged for all in two phases, and what the second message lost there.
    """

    mean: Tensor
    own: Tensor | None
    lost: tuple[slice, Tensor] | None = None


@dataclass(frozen=True)
class NodeTiers:
    """Ranks of nodes with equally many ranks: `node` has those of this rank's node, `across` the one like it on each node."""

    node: dist.ProcessGroup
    across: Peers


def exchange(
    x: Tensor, compressor: Compressor, peers: Peers, seed: int, before: Tensor | None = None, spent: Spent | None = None,
    *, wants_own: bool = True,
) -> Exchanged:  # fmt: skip
    """Average x, fp32 of shape (n,), over the ranks. Collective.

    Args:
        seed: the same on all ranks; ranks that encode for themselves add their number to it.
        before: for two phases, numbers of shape (n,) that this rank adds to the mean of its range.
        spent: receives the times.
        wants_own: whether `own` is needed; if not, two phases may return the mean in the memory of x.
    """
    spent = spent or Spent(x.device, is_measured=False)
    compressor = spent.coding(compressor)
    if compressor.exchange == "sum":
        return _sum(x, compressor, peers, seed, spent)
    if compressor.exchange == "gather":
        return _gather(x, compressor, peers, seed + peers.place, spent)
    return _two_phase(x, compressor, peers, seed + peers.place, before, spent, wants_own)


def exchange_between_nodes(
    x: Tensor, compressor: Compressor, tiers: NodeTiers, seed: int, before: Tensor | None, spent: Spent,
    *, wants_own: bool = True,
) -> Exchanged:  # fmt: skip
    """Average x as `exchange` does, but dense in nodes: each rank of a node exchanges one part of the node's mean.

    What a rank's message lost of the node's mean is then its own loss, multiplied by the ranks per node.
    """
    ranks, n = tiers.node.size(), len(x)
    length = _part_length(n, compressor.block, ranks)
    start = tiers.node.rank() * length
    here = slice(min(n, start), min(n, start + length))

    def padded(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, ranks * length - n))

    with spent.on(NODE):
        part = node_reduce_scatter(padded(x) / ranks, "sum", tiers.node)
    before = None if before is None else padded(before)[start : start + length]
    found = exchange(part, compressor, tiers.across, seed, before, spent, wants_own=wants_own)
    mean = part.new_empty(ranks * length)
    with spent.on(NODE):
        all_gather_single(mean, found.mean, group=tiers.node)
    if found.own is None:
        return Exchanged(mean[:n], None)
    own = x.clone()
    own[here] -= ranks * (part - found.own)[: here.stop - here.start]
    if found.lost is None:
        return Exchanged(mean[:n], own)
    owned, lost = found.lost
    place = slice(min(n, start + owned.start), min(n, start + owned.stop))
    return Exchanged(mean[:n], own, (place, lost[: place.stop - place.start]))


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


def _sum(x: Tensor, compressor: Compressor, peers: Peers, seed: int, spent: Spent) -> Exchanged:
    message = compressor.encode(x[None] / peers.size, seed)
    own = compressor.decode(message, len(x), seed)[0] * peers.size
    if message.numel():
        with spent.on(WIRE):
            backend_all_reduce(message, "sum", peers.group)
    return Exchanged(compressor.decode(message, len(x), seed)[0], own)


def _two_phase(
    x: Tensor, compressor: Compressor, peers: Peers, seed: int, before: Tensor | None, spent: Spent, wants_own: bool
) -> Exchanged:
    """Average in two phases; a segment is encoded while others are on their way."""
    ranks, n = peers.size, len(x)
    length = _part_length(n, compressor.block, ranks)
    owned = slice(min(n, peers.place * length), min(n, (peers.place + 1) * length))
    is_whole = n == ranks * length
    rows = (x if is_whole else torch.nn.functional.pad(x, (0, ranks * length - n))).view(ranks, length)
    # All of x is encoded when the first means arrive: without `own`, they need no memory of their own.
    own, mean = (torch.empty_like(rows), torch.empty_like(rows)) if wants_own else (None, rows)
    part = rows.new_zeros(length)
    if before is not None:
        part[: owned.stop - owned.start] = before[owned]

    def first_phase(columns: slice) -> tuple[slice, Tensor, Callable[[], None]]:
        width = columns.stop - columns.start
        sent = compressor.encode(rows[:, columns], seed + 2 * ranks * columns.start)
        received = torch.empty_like(sent)
        wait = _started(
            lambda is_async: dist.all_to_all_single(received, sent, group=peers.group, async_op=is_async), x, spent
        )
        if own is not None:
            own[:, columns] = compressor.decode(sent, width, seed + 2 * ranks * columns.start)
        return columns, received, wait

    def second_phase(
        columns: slice, received: Tensor, wait: Callable[[], None]
    ) -> tuple[slice, Tensor, Callable[[], None]]:
        wait()
        width = columns.stop - columns.start
        part[columns] += compressor.decode(received, width, seed + 2 * ranks * columns.start).sum(0).div_(ranks)
        again = compressor.encode(part[None, columns], seed + ranks + 2 * ranks * columns.start)
        gathered = again.new_empty(ranks, again.shape[1])
        wait = _started(
            lambda is_async: all_gather_single(gathered, again, group=peers.group, async_op=is_async), x, spent
        )
        return columns, gathered, wait

    begun, ending = [], []
    for columns in _segments(length, compressor.block, ranks, x.device):
        begun.append(first_phase(columns))
        if len(begun) > _AHEAD:
            ending.append(second_phase(*begun.pop(0)))
    ending += [second_phase(*one) for one in begun]
    for columns, gathered, wait in ending:
        wait()
        # The owner, too, decodes the message, so that it has the bits of the other ranks.
        mean[:, columns] = compressor.decode(gathered, columns.stop - columns.start, seed)
    found = mean.view(-1)[:n]
    if own is None:
        return Exchanged(found, None)
    return Exchanged(found, own.view(-1)[:n], (owned, part[: owned.stop - owned.start] - found[owned]))


def _segments(length: int, block: int, ranks: int, device: torch.device) -> Iterator[slice]:
    """Yield ranges of whole blocks of each rank's part; on a GPU one, because its stream is in order anyway."""
    least = max(_SEGMENT // ranks, length // _SEGMENTS) if device.type == "cpu" else length
    width = max(1, -(-least // block)) * block
    for start in range(0, length, width):
        yield slice(start, min(length, start + width))


def _started(call: Callable[[bool], dist.Work | None], x: Tensor, spent: Spent) -> Callable[[], None]:
    """Start a transfer and return what waits for it; on a GPU the stream waits, so that there is nothing left to do."""
    if x.device.type == "cpu":
        return spent.transfer(lambda: call(True))  # type: ignore[arg-type, return-value]
    with spent.on(WIRE):
        call(False)
    return lambda: None


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


def _gather(x: Tensor, compressor: Compressor, peers: Peers, seed: int, spent: Spent) -> Exchanged:
    message = compressor.encode(x[None], seed)
    lengths = torch.tensor([[message.shape[1]]], device=x.device)
    with spent.on(WIRE):  # lengths differ if they depend on the numbers
        counts = _all_gathered(lengths, peers)[:, 0].tolist()
    padded = torch.nn.functional.pad(message, (0, max(counts) - message.shape[1]))
    with spent.on(WIRE):
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

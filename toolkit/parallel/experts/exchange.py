"""The exchange of tokens between the ranks of `parallel.ep`, which each have some of the experts.

Each rank sends to every rank the tokens that chose one of its experts, and gets their outputs back in the same order. The
two halves of an exchange are separate, so that other work, such as a shared expert, hides it; in the backward pass too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.metrics.step_profile import ALL_TO_ALL
from toolkit.world.waits import waits_as

__all__ = ["Exchange", "exchange_tokens"]

Splits = list[int]


@dataclass
class Exchange:
    """An all-to-all exchange between its two halves.

    Args:
        sent, received: the number of rows that this rank sends to, and receives from, each rank of `group`.
    """

    group: dist.ProcessGroup
    sent: Splits
    received: Splits
    work: dist.Work | None = field(default=None, init=False)
    returning: Tensor | None = field(default=None, init=False)  # gradients on their way back

    def start(self, rows: Tensor) -> Tensor:
        """Send rows, in the order of the ranks; the result is valid only after `finish`."""
        return cast(Tensor, _Start.apply(rows, self))

    def finish(self, rows: Tensor) -> Tensor:
        """Return the received rows, in the order of the ranks, when all have arrived."""
        return cast(Tensor, _Finish.apply(rows, self))


def _all_to_all(rows: Tensor, sent: Splits, received: Splits, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    arriving = rows.new_empty(sum(received), *rows.shape[1:])
    work = dist.all_to_all_single(arriving, rows.contiguous(), received, sent, group=group, async_op=True)
    assert work is not None
    return arriving, work


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        arriving, exchange.work = _all_to_all(rows, exchange.sent, exchange.received, exchange.group)
        return arriving

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        exchange: Exchange = ctx.exchange
        assert exchange.work is not None
        with waits_as(ALL_TO_ALL):
            exchange.work.wait()
        returned, exchange.returning = exchange.returning, None
        return returned, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        assert exchange.work is not None, "call start() first"
        with waits_as(ALL_TO_ALL):
            exchange.work.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange: Exchange = ctx.exchange
        exchange.returning, exchange.work = _all_to_all(gradient, exchange.received, exchange.sent, exchange.group)
        # The gradient of the rows here arrives in `_Start`; autograd wants one of this shape now.
        return gradient.new_zeros(()).expand_as(gradient), None


def exchange_tokens(
    rows: Tensor,
    experts: Tensor,
    count: int,
    group: dist.ProcessGroup | None,
    compute: Callable[[Tensor, Tensor], Tensor],
    meanwhile: Callable[[], None],
) -> Tensor:
    """Return the output of each row's expert, in the order of the rows. Collective over `group`.

    Args:
        rows: (rows, width).
        experts: (rows,), the expert of each row, of `count` experts. Rank 0 of the group has the first ones.
        compute: returns the outputs of rows that are ordered by expert, from them and the number of rows of each expert.
        meanwhile: called while rows travel.
    """
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=count)
    sorted_rows = rows[order]
    if group is None:
        meanwhile()
        outputs = compute(sorted_rows, counts)
    else:
        outputs = _over_ranks(sorted_rows, counts, group, compute, meanwhile)
    return outputs[_inverse(order)]


def _over_ranks(
    rows: Tensor,
    counts: Tensor,
    group: dist.ProcessGroup,
    compute: Callable[[Tensor, Tensor], Tensor],
    meanwhile: Callable[[], None],
) -> Tensor:
    ranks = dist.get_world_size(group)
    arriving = torch.empty_like(counts)
    with waits_as(ALL_TO_ALL):
        dist.all_to_all_single(arriving, counts, group=group)
    by_rank = arriving.view(ranks, -1)  # (source rank, expert of this rank)
    # The only wait for the device in a layer: the host must know how many rows to expect.
    sent, received = torch.stack([counts.view(ranks, -1).sum(1), by_rank.sum(1)]).tolist()
    there, back = Exchange(group, sent, received), Exchange(group, received, sent)
    travelling = there.start(rows)
    meanwhile()
    arrived = there.finish(travelling)
    # Rows are ordered by source rank and then by expert; experts need them by expert.
    labels = (
        torch.arange(by_rank.shape[1], device=rows.device)
        .repeat(ranks)
        .repeat_interleave(arriving, output_size=sum(received))
    )
    order = labels.argsort(stable=True)
    outputs = compute(arrived[order], by_rank.sum(0))
    return back.finish(back.start(outputs[_inverse(order)]))


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse

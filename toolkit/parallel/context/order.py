"""Which tokens of a sequence a context-parallel rank has: one part from its head and one from its tail.

A sequence is cut into 2 x cp parts; rank r has parts r and 2 cp - 1 - r, in this order. With causal attention every
rank then computes the same number of products: a token near the tail attends to many, one near the head to few.
"""

import torch
from torch import Tensor

from toolkit.errors import ToolkitError

__all__ = ["own_positions", "own_tokens", "sequence_order"]


def own_tokens(tensor: Tensor, place: int, ranks: int) -> Tensor:
    """Return this rank's part of a batch of sequences, (batch, tokens, ...): (batch, tokens / ranks, ...).

    Args:
        place: the index of the rank among those that share a sequence.
        ranks: their number; with 1, the result is `tensor`.

    Raises:
        ToolkitError: the tensor has no sequences, or their length is not a multiple of 2 x ranks.
    """
    if ranks == 1:
        return tensor
    if tensor.dim() < 2:
        raise ToolkitError(
            f"expected a batch of sequences, (batch, tokens), got the shape {tuple(tensor.shape)}",
            where="parallel.cp",
            fix="set cp = 1, or return inputs and targets of shape (batch, tokens, ...) from the source",
        )
    part = _part_of(tensor.shape[1], ranks)
    last = 2 * ranks - 1 - place
    return torch.cat([tensor.narrow(1, place * part, part), tensor.narrow(1, last * part, part)], 1)


def own_positions(tokens: int, place: int, ranks: int) -> Tensor:
    """Return the positions in the sequence of the `tokens` tokens of this rank, (tokens,)."""
    return own_tokens(torch.arange(tokens * ranks)[None], place, ranks)[0]


def sequence_order(tokens: int, ranks: int) -> Tensor:
    """Return the indices that sort the concatenated parts of all ranks, `tokens` tokens each, into one sequence."""
    return torch.cat([own_positions(tokens, place, ranks) for place in range(ranks)]).argsort()


def _part_of(tokens: int, ranks: int) -> int:
    """Return the length of one of the 2 x ranks parts of a sequence."""
    if tokens % (2 * ranks):
        below = tokens // (2 * ranks) * 2 * ranks
        raise ToolkitError(
            f"expected sequences with a multiple of 2 x cp = {2 * ranks} tokens, got {tokens}",
            where="parallel.cp",
            fix=f"use {f'{below} or ' if below else ''}{below + 2 * ranks} tokens, or another cp",
        )
    return tokens // (2 * ranks)

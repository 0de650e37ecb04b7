"""Compressors that send the signs of a gradient, and at most two numbers per block."""

import torch
from torch import Tensor

from toolkit.comm.compression.compressor import Compressor, blocks_of, join, pack, take, unpack

_NAN = 3


def majority_sign() -> Compressor:
    """Return signSGD with majority vote (arXiv:1810.05291): the result is -1, 0 or 1, and 0 for a tie.

    It sends 2 bits, so that a zero remains zero on every rank.
    """

    def encode(values: Tensor, seed: int) -> Tensor:
        codes = values.sign().add_(1).masked_fill_(values.isnan(), _NAN)
        return pack(codes.to(torch.uint8), 2)

    def decode(messages: Tensor, n: int, seed: int) -> Tensor:
        signs = unpack(messages, 2).float().sub_(1)
        return signs.masked_fill_(signs == _NAN - 1, torch.nan)

    return Compressor("two_phase", encode, decode, wire_bytes=lambda n: n // 4, contraction=None, block=4)


def one_bit(block: int, *, values_per_block: int) -> Compressor:
    """Return the sign with one reconstruction value per block, the mean of |x|, or with two.

    One is EF-signSGD (arXiv:1901.09847); two are the means of the numbers from 0 on and of those below, as in 1-bit SGD
    (Seide et al., Interspeech 2014).
    """

    def encode(values: Tensor, seed: int) -> Tensor:
        x = blocks_of(values, block)
        return join(pack((x >= 0).to(torch.uint8).flatten(1), 1), reconstruction(x))

    def reconstruction(x: Tensor) -> Tensor:
        """Return the values for numbers from 0 on and for those below, (rows, blocks, 1 or 2)."""
        if values_per_block == 1:
            return x.abs().mean(-1, keepdim=True)
        upper = x >= 0
        count = upper.sum(-1)
        above = torch.where(upper, x, torch.zeros_like(x)).sum(-1) / count.clamp(min=1)
        below = torch.where(upper, torch.zeros_like(x), x).sum(-1) / (block - count).clamp(min=1)
        return torch.stack([above, below], -1)

    def decode(messages: Tensor, n: int, seed: int) -> Tensor:
        upper = blocks_of(unpack(messages[:, : n // 8], 1), block).bool()
        kept = take(messages, n // 8, torch.float32, n // block, values_per_block)
        below = -kept if values_per_block == 1 else kept[..., 1:]
        # The sum with NaN makes both values NaN if one is.
        nothing = (kept * 0).sum(-1, keepdim=True)
        return torch.where(upper, kept[..., :1] + nothing, below + nothing).flatten(1)

    def contraction(values: Tensor) -> float:
        return float((blocks_of(values, block).abs().sum(-1).square() / block).sum() / values.square().sum())

    def wire_bytes(n: int) -> int:
        return n // 8 + 4 * values_per_block * (n // block)

    return Compressor("two_phase", encode, decode, wire_bytes, contraction, block=block)

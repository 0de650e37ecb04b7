"""One block of attention, forward and backward, by torch's fused kernels, which also return the log-sum-exp of scores.

Tensors have the shape (batch, heads, tokens, head width); keys and values may have fewer heads than queries, which then
share them in groups. The log-sum-exp is (batch, heads, tokens).
"""

import torch
from torch import Tensor

__all__ = ["attend", "attend_backward", "merge"]

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention of queries to one block of keys, and the log-sum-exp of their scores in fp32."""
    key, value = _repeated(key, query), _repeated(value, query)
    if query.device.type == "cpu":
        mixed, sums = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
    elif query.dtype in _HALF:
        mixed, sums, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    else:
        mixed, sums, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, is_causal, scale=scale
        )
    return mixed, sums[..., : query.shape[2]].float()  # CUDA kernels pad the length


def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, sums: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what a block contributes to the gradients of queries, keys and values.

    Args:
        gradient: that of `mixed`.
        mixed, sums: the attention to all blocks, and the log-sum-exp over all blocks.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = _repeated(key, query), _repeated(value, query)
    none = torch.empty((), dtype=torch.int64, device=query.device)  # the state of a dropout that is off
    if query.device.type == "cpu":
        of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, mixed, sums, 0.0, is_causal, scale=scale
        )
    elif query.dtype in _HALF:
        # Offsets of packed sequences: any tensor, even an empty one, selects the kernel for packed sequences.
        not_packed = (None, None)
        of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, mixed, sums.contiguous(), *not_packed, query.shape[2], key.shape[2], 0.0, is_causal,
            none, none, scale=scale,
        )  # fmt: skip
    else:
        padded = torch.nn.functional.pad(sums, (0, -sums.shape[2] % 32), value=float("inf"))
        of_query, of_key, of_value, _ = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, None, mixed, padded, none, none, 0.0, (True, True, True, False), is_causal,
            scale=scale,
        )  # fmt: skip
    return of_query, _summed(of_key, groups), _summed(of_value, groups)


def merge(mixed: Tensor, sums: Tensor, block: Tensor, block_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention to two sets of keys, in fp32, from the attention to each and their log-sum-exps."""
    both = torch.logaddexp(sums, block_sums)
    return mixed * (sums - both).exp()[..., None] + block * (block_sums - both).exp()[..., None], both


def _repeated(shared: Tensor, query: Tensor) -> Tensor:
    groups = query.shape[1] // shared.shape[1]
    return shared if groups == 1 else shared.repeat_interleave(groups, 1)


def _summed(gradient: Tensor, groups: int) -> Tensor:
    return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)

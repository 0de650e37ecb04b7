"""The compressor of each algorithm of `[gradient_compression]`."""

from collections.abc import Callable

import torch

from toolkit.comm.compression import quantise, signs, sparse
from toolkit.comm.compression.compressor import Compressor
from toolkit.config.gradient_compression import GradientCompressionTable

__all__ = ["BUILD"]

Build = Callable[[GradientCompressionTable], Compressor]


def _blocks(levels: int) -> Build:
    return lambda one: quantise.quantiser(levels, one.block, is_stochastic=one.rounding == "stochastic")


# All but "powersgd", which has two exchanges per step (low_rank.py).
BUILD: dict[str, Build] = {
    "bf16": lambda one: quantise.cast(torch.bfloat16),
    "fp16": lambda one: quantise.cast(torch.float16),
    "int8": _blocks(127),
    "int4": _blocks(7),
    "qsgd": lambda one: quantise.quantiser(one.levels, one.block, is_stochastic=True, norm="euclidean"),
    "terngrad": lambda one: quantise.quantiser(1, one.block, is_stochastic=True),
    "natural": lambda one: quantise.natural(),
    "sign": lambda one: signs.majority_sign(),
    "ef_sign": lambda one: signs.one_bit(one.block, values_per_block=1),
    "one_bit": lambda one: signs.one_bit(one.block, values_per_block=2),
    "top_k": lambda one: sparse.top_k(one.density),
    "threshold": lambda one: sparse.above(one.threshold, one.density),
    "gaussian_k": lambda one: sparse.gaussian_k(one.density),
    "random_k": lambda one: sparse.random_k(one.density, is_scaled=not one.has_feedback),
    "bernoulli": lambda one: sparse.bernoulli(one.density, is_scaled=not one.has_feedback),
    "ef21": lambda one: sparse.top_k(one.density),
}

"""Compressors that send some numbers of a gradient: the largest, those above a threshold, or random ones."""

from statistics import NormalDist

import torch
from torch import Tensor

from toolkit.comm.compression.compressor import Compressor, euclidean_norms, join, take, uniform
from toolkit.errors import ToolkitError

_PAIR = 8  # bytes of an int32 index and an fp32 value
_LARGE = 1 << 16  # numbers from which `_largest` first estimates a threshold


def count_of(density: float, n: int) -> int:
    """Return how many of n numbers a density selects: at least one."""
    return max(1, min(n, round(density * n)))


def top_k(density: float) -> Compressor:
    """Return the choice of the largest magnitudes."""
    return Compressor(
        "gather",
        encode=lambda values, seed: _pairs(values, _largest(values, count_of(density, values.shape[1]))),
        decode=_scatter,
        wire_bytes=lambda n: _PAIR * count_of(density, n),
        contraction=lambda values: count_of(density, values.shape[1]) / values.shape[1],
    )


def above(threshold: float, density: float) -> Compressor:
    """Return the choice of magnitudes from `threshold` on; at most the share `density`, the largest."""
    return Compressor(
        "gather",
        encode=lambda values, seed: _pairs(values, _from(values, threshold, count_of(density, values.shape[1]))),
        decode=_scatter,
        wire_bytes=lambda n: _PAIR * count_of(density, n),
        contraction=None,
    )


def gaussian_k(density: float) -> Compressor:
    """Return the choice of about k magnitudes, above a threshold from a normal fit (arXiv:1911.08772).

    The threshold is corrected up to four times, until 2/3 to 4/3 of k are above it; at most 4/3 of k are sent.
    """

    def most(n: int) -> int:
        return min(n, -(-4 * count_of(density, n) // 3))

    def encode(values: Tensor, seed: int) -> Tensor:
        k = count_of(density, values.shape[1])
        magnitude = values.abs()
        deviation = float(euclidean_norms(values)) / values.shape[1] ** 0.5
        threshold = deviation * NormalDist().inv_cdf(1 - k / values.shape[1] / 2)
        for _ in range(4):
            found = int((magnitude >= threshold).sum())
            if 2 * k <= 3 * found <= 4 * k:
                break
            threshold *= 0.5 if found < k else 1.5
        return _pairs(values, _from(values, threshold, most(values.shape[1])))

    return Compressor("gather", encode, _scatter, wire_bytes=lambda n: _PAIR * most(n), contraction=None)


def random_k(density: float, *, is_scaled: bool) -> Compressor:
    """Return the choice of one random number in every 1 / density; all ranks choose the same.

    `is_scaled` multiplies the numbers by 1 / density, which makes the mean exact. With error feedback they must not be.
    """
    stride = max(1, round(1 / density))

    def chosen(rows: int, n: int, device: torch.device, seed: int) -> Tensor:
        drawn = uniform((1, -(-n // stride), 1), device, seed).mul_(stride).long().clamp_(max=stride - 1)
        return drawn.expand(rows, -1, -1)

    def encode(values: Tensor, seed: int) -> Tensor:
        padded = torch.nn.functional.pad(values, (0, -values.shape[1] % stride)).unflatten(1, (-1, stride))
        return padded.gather(2, chosen(len(values), values.shape[1], values.device, seed)).flatten(1)

    def decode(messages: Tensor, n: int, seed: int) -> Tensor:
        rows, count = messages.shape
        values = messages.new_zeros(rows, count, stride)
        factor = stride if is_scaled else 1
        values.scatter_(2, chosen(rows, n, messages.device, seed), messages.unsqueeze(2) * factor)
        return values.flatten(1)[:, :n]

    contraction = None if is_scaled else lambda values: 1 / stride
    return Compressor("sum", encode, decode, lambda n: 4 * -(-n // stride), contraction, is_scaled)


def bernoulli(density: float, *, is_scaled: bool) -> Compressor:
    """Return the choice of each number with the probability `density`; all ranks choose the same, as in `random_k`."""

    def places(n: int, device: torch.device, seed: int) -> Tensor:
        return (uniform((n,), device, seed) < density).nonzero()[:, 0]

    def decode(messages: Tensor, n: int, seed: int) -> Tensor:
        values = messages.new_zeros(len(messages), n)
        values[:, places(n, messages.device, seed)] = messages / density if is_scaled else messages
        return values

    def encode(values: Tensor, seed: int) -> Tensor:
        return values[:, places(values.shape[1], values.device, seed)]

    contraction = None if is_scaled else lambda values: density
    return Compressor("sum", encode, decode, lambda n: round(4 * density * n), contraction, is_scaled)


def _largest(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest magnitudes of each row, (rows, k), in any order."""
    magnitude = values.abs()
    n = values.shape[1]
    if len(values) == 1 and n >= _LARGE and k <= n // 8:
        # torch.topk is slow. A threshold from a sample leaves few numbers, which contain the k largest if they are k.
        sample = magnitude[0, :: n // (_LARGE // 4)]
        wanted = min(len(sample), 2 * k * len(sample) // n + 16)
        likely = (magnitude[0] >= sample.topk(wanted).values.amin()).nonzero()[:, 0]
        if len(likely) >= k:
            return likely[magnitude[0, likely].topk(k, sorted=False).indices][None]
    return magnitude.topk(k, sorted=False).indices


def _from(values: Tensor, threshold: float, most: int) -> Tensor:
    """Return the indices of the magnitudes from `threshold` on, and of NaN, of one row: (1, any number up to `most`)."""
    chosen = (~(values[0].abs() < threshold)).nonzero()[:, 0]
    return chosen[None] if len(chosen) <= most else _largest(values, most)


def _pairs(values: Tensor, indices: Tensor) -> Tensor:
    if values.shape[1] >= 1 << 31:
        raise ToolkitError(
            f"expected fewer than 2^31 numbers, got {values.shape[1]}",
            where="gradient_compression.algorithm",
            fix="use smaller buckets (parallel.bucket_mb), or another algorithm",
        )
    return join(indices.int(), values.gather(1, indices))


def _scatter(messages: Tensor, n: int, seed: int) -> Tensor:
    """Return the values at their indices, zero elsewhere."""
    k = messages.shape[1] // _PAIR
    indices, chosen = take(messages, 0, torch.int32, k), take(messages, 4 * k, torch.float32, k)
    return messages.new_zeros(len(messages), n, dtype=torch.float32).scatter_(1, indices.long(), chosen)

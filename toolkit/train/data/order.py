"""The order of samples: a function of the seed and the global sample index alone.

A run only stores the number of samples already read. Sample `i` is the same part of the data for any number of ranks,
so a run that resumes with other ranks neither repeats nor skips a sample.
"""

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ToolkitError

_ROUNDS = 4


class SampleOrder:
    """A new permutation of `count` samples in each epoch, computed on demand and never stored.

    A Feistel network over the smallest even number of bits that represents `count`; values outside [0, count) are
    mapped again until they are inside (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA
    2002). Four rounds yield a pseudorandom permutation (Luby and Rackoff, 1988).
    """

    def __init__(self, count: int, seed: int) -> None:
        assert count > 0
        self.count = count
        self.seed = seed
        self._half_bits = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)

    def positions(self, samples: range | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions in [0, count) of the global samples; shape (len(samples),)."""
        if isinstance(samples, range):
            samples = np.arange(samples.start, samples.stop, samples.step, dtype=np.int64)
        index = samples.astype(np.uint64)
        epoch, place = np.divmod(index, np.uint64(self.count))
        key = _mix(epoch + _mix(np.full_like(epoch, self.seed % 2**64)))
        place = self._permute(place, key)
        while (outside := place >= self.count).any():
            place[outside] = self._permute(place[outside], key[outside])
        return place.astype(np.int64)

    def _permute(self, value: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = value >> self._half_bits, value & self._half_mask
        for number in range(_ROUNDS):
            scrambled = _mix(right + _mix(key + np.uint64(number)))
            left, right = right, left ^ (scrambled & self._half_mask)
        return (left << self._half_bits) | right


def share(first: int, batch: int, rank: int, size: int) -> range:
    """Return one rank's part of the samples [first, first + batch); the parts differ by at most one sample.

    Raises:
        ToolkitError: a rank would get no sample, although every rank must take part in a step.
    """
    if batch < size:
        raise ToolkitError(
            f"expected a batch of at least 1 sample per rank, got {batch} for {size} ranks",
            where="train.batch",
            fix=f"set train.batch to {size} or more",
        )
    return range(first + batch * rank // size, first + batch * (rank + 1) // size)


def split(samples: range, at_most: int, at_least: int = 1) -> list[range]:
    """Split the samples into micro-batches of `at_most` samples; 0 returns a single micro-batch.

    If that makes fewer than `at_least`, return this many, of similar sizes, as far as there are samples.
    """
    length = at_most or len(samples)
    parts = [samples[start : start + length] for start in range(0, len(samples), length)]
    count = min(at_least, len(samples))
    if len(parts) >= count:
        return parts
    return [samples[len(samples) * part // count : len(samples) * (part + 1) // count] for part in range(count)]


def passes_of(batch: int, size: int, at_most: int) -> int:
    """Return the number of micro-batches of the rank with most samples; ranks that share a model all have as many."""
    most = -(-batch // size)
    return -(-most // (at_most or most))


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the splitmix64 finalizer of `value` (Steele, Lea and Flood, OOPSLA 2014); arithmetic is modulo 2**64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))

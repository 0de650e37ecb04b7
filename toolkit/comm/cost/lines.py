"""Time against bytes as measured: straight lines between the sizes that were tried.

Below the smallest size the latency stays; above the largest its bytes per second go on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median


@dataclass(frozen=True)
class Segment:
    """From `first_bytes` on a message takes `latency_s` and `seconds_per_byte` for each of its bytes."""

    first_bytes: float
    latency_s: float
    seconds_per_byte: float


@dataclass(frozen=True)
class Line:
    """Seconds of a message by its bytes; segments by their first bytes, the first of which is 0."""

    segments: tuple[Segment, ...]

    def seconds(self, size_bytes: float) -> float:
        """The time of a message of so many bytes; none takes none."""
        if size_bytes <= 0:
            return 0.0
        at = bisect_right([segment.first_bytes for segment in self.segments], size_bytes) - 1
        segment = self.segments[at]
        return segment.latency_s + size_bytes * segment.seconds_per_byte

    @property
    def latency_s(self) -> float:
        """Of the smallest messages."""
        return self.segments[0].latency_s

    @property
    def bytes_per_s(self) -> float:
        """Of the largest messages."""
        return 1 / self.segments[-1].seconds_per_byte


def fit(samples: Mapping[int, list[float]]) -> Line:
    """The line through the medians of measured seconds by bytes, of two sizes or more.

    A smaller message never takes more time than a larger one: where noise says so, the larger one's time counts, since
    noise only adds.
    """
    sizes = sorted(samples)
    assert len(sizes) >= 2, "a line needs two sizes"
    times = [median(samples[size]) for size in sizes]
    for index in reversed(range(len(times) - 1)):
        times[index] = min(times[index], times[index + 1])
    segments = []
    for (low, begin), (high, end) in pairwise(zip(sizes, times, strict=True)):
        slope = max((end - begin) / (high - low), 1e-15)
        segments.append(Segment(float(low), begin - slope * low, slope))
    if segments[0].latency_s > 0:
        segments[0] = replace(segments[0], first_bytes=0.0)
    else:  # it would begin below zero: no latency can be told from these sizes
        segments.insert(0, Segment(0.0, 0.0, times[0] / sizes[0]))
    # Not the last segment's slope: what a middle size waits for is hidden behind the bytes of larger ones.
    segments.append(Segment(float(sizes[-1]), 0.0, times[-1] / sizes[-1]))
    return Line(tuple(segments))

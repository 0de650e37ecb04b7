"""Statistics that outliers do not move. Standard library only."""

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median

__all__ = ["entropy", "mad", "mann_kendall_z", "theil_sen"]

_MAD_TO_SD = 1.4826  # standard deviations of a normal distribution per median absolute deviation


def mad(values: Sequence[float], center: float) -> float:
    """Return the median absolute deviation, scaled to equal a standard deviation for normal values."""
    return _MAD_TO_SD * median(abs(value - center) for value in values)


def theil_sen(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the median slope of all pairs of points; 0 with fewer than two distinct times."""
    slopes = [
        (values[j] - values[i]) / (times[j] - times[i])
        for i, j in combinations(range(len(values)), 2)
        if times[j] != times[i]
    ]
    return median(slopes) if slopes else 0.0


def mann_kendall_z(values: Sequence[float]) -> float:
    """Return the z score of the Mann-Kendall test: above 3, the values rise; ties are not corrected."""
    count = len(values)
    rises = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    if count < 2 or not rises:
        return 0.0
    return (rises - math.copysign(1, rises)) / math.sqrt(count * (count - 1) * (2 * count + 5) / 18)


def entropy(labels: Iterable[object]) -> float:
    """Return the entropy of the labels in nats: 0 if all are equal, log(n) if n labels are equally frequent."""
    counts: dict[object, int] = {}
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())

"""Memory in use is reported once when it crosses a level, and cleared only well below it."""

from __future__ import annotations

from toolkit.metrics.judge import Detectors
from toolkit.metrics.samples import MemorySample
from toolkit.metrics.verdicts import VerdictKind


def verdicts_of(shares: list[float], ranks: int = 2) -> list[tuple[int, str, str]]:
    """(number of the sample, severity, state) of each line of the file."""
    detectors, lines = Detectors(0), []
    for number, share in enumerate(shares):
        samples = [
            MemorySample(10.0 * number, "n0", rank, "gpu 0", 100 * share / ranks, 100 * (1 - share))
            for rank in range(ranks)
        ]
        for one in detectors.observe([], samples, now_s=10.0 * number):
            assert one.kind is VerdictKind.MEMORY_PRESSURE
            lines.append((number, one.severity.value, one.state))
    return lines


def test_each_level_is_reported_once() -> None:
    assert verdicts_of([0.5, 0.61, 0.7, 0.81, 0.95]) == [(1, "info", "raised"), (3, "warning", "raised")]


def test_memory_around_a_level_is_not_reported_again() -> None:
    assert verdicts_of([0.61, 0.59, 0.61, 0.56, 0.62]) == [(0, "info", "raised")]
    assert verdicts_of([0.61, 0.54, 0.61]) == [(0, "info", "raised"), (1, "info", "cleared"), (2, "info", "raised")]


def test_little_use_is_not_reported() -> None:
    assert verdicts_of([0.1, 0.59]) == []

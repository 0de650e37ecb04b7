"""Memory in use is reported once when it crosses a level, and cleared only well below it."""

from __future__ import annotations

from toolkit.metrics.detectors.memory_pressure import MemoryPressureDetector
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


def test_steady_growth_of_a_minute_predicts_when_the_limit_is_reached() -> None:
    def found(*uses: float) -> str:
        detector, verdicts = MemoryPressureDetector(), []
        for number, used in enumerate(uses):
            verdicts = detector.observe([MemorySample(10.0 * number, "n0", 1, "host", used, 100 - used)])
        return verdicts[0].message

    assert "reach the limit in 40 s at the growth of the last minute" in found(50, 55, 60, 65, 70, 75, 80)
    for steady in ((80, 80, 80, 80, 80), (50, 80, 70, 80, 70, 85), (75, 80)):
        assert "reach the limit" not in found(*steady)


def test_host_memory_can_be_requested() -> None:
    (verdict,) = MemoryPressureDetector().observe([MemorySample(0.0, "n0", 1, "host", 90, 10)])
    assert "job.mem_gb_per_node" in verdict.change

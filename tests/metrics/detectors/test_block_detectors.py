"""Detectors of whole jobs over blocks: throughput, starvation, imbalance, saves."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from step_windows import STEP_S, block

from toolkit.metrics.detectors.imbalance import ImbalanceDetector
from toolkit.metrics.detectors.saves import SaveDetector
from toolkit.metrics.detectors.starvation import StarvationDetector
from toolkit.metrics.detectors.throughput import ThroughputDetector
from toolkit.metrics.verdicts import Verdict, VerdictKind
from toolkit.metrics.windows import CPU_WAIT, DATA, EXPOSED, SAVE, STEP, WORK, WORK_CPU, Statistics


def first_block(detector: ThroughputDetector, step_s: Callable[[int], float], blocks: int = 80) -> int | None:
    found = (number for number in range(blocks) if detector.observe(block(number, 2, **{STEP: step_s(number)})))
    return next(found, None)


@pytest.mark.parametrize(("factor", "blocks"), [(1.1, 4), (1.2, 3), (1.5, 3)])
def test_a_drop_is_found_after_a_few_blocks(factor: float, blocks: int) -> None:
    assert first_block(ThroughputDetector(), lambda number: STEP_S * (factor if number >= 40 else 1)) == 39 + blocks


def test_noise_a_slow_start_and_a_slow_block_are_not_a_drop() -> None:
    draw = random.Random(1)
    assert first_block(ThroughputDetector(), lambda number: STEP_S * draw.gauss(1, 0.02)) is None
    assert first_block(ThroughputDetector(), lambda number: STEP_S * (3 if number < 15 else 1)) is None
    assert first_block(ThroughputDetector(), lambda number: STEP_S * (3 if number % 20 == 15 else 1)) is None


def test_the_cost_of_a_drop_is_the_time_beyond_the_best_steps_and_it_ends_with_the_drop() -> None:
    detector = ThroughputDetector()
    found: list[list[Verdict]] = [
        detector.observe(block(number, 2, **{STEP: STEP_S * (1.25 if 20 <= number < 40 else 1)}))
        for number in range(60)
    ]
    (verdict,) = found[39]
    assert verdict.cost_s_per_hour == pytest.approx(720)
    assert "250 ms instead of 200 ms" in verdict.message
    assert not any(found[46:])


@pytest.mark.parametrize("factor", [1.1, 1.2, 2.0])
def test_a_drop_is_named_with_its_size_from_its_first_verdict_on(factor: float) -> None:
    """Blocks before the drop do not reduce it, and blocks after it are not reported as a smaller one."""
    detector = ThroughputDetector()
    steps = [STEP_S * (factor if 20 <= number < 40 else 1) for number in range(80)]
    found = [one for n, step_s in enumerate(steps) for one in detector.observe(block(n, 2, **{STEP: step_s}))]
    named = [one.evidence["step_s"] / one.evidence["best_step_s"] for one in found]
    assert named and named == pytest.approx([factor] * len(named))


def test_a_drop_below_the_slack_is_not_named_while_the_sum_returns() -> None:
    draw, detector = random.Random(3), ThroughputDetector()
    for number in range(400):
        step_s = STEP_S * draw.gauss(1, 0.01) * (1.4 if number % 100 in range(60, 66) else 1)
        for one in detector.observe(block(number, 2, **{STEP: step_s})):
            assert one.evidence["step_s"] > 1.05 * one.evidence["best_step_s"]


def test_waiting_for_data_on_the_median_rank_is_starvation_and_on_one_rank_is_not() -> None:
    for slow, is_found in (({0, 1, 2}, True), ({0}, False)):
        detector = StarvationDetector()
        changes = {rank: {DATA: 0.3 * STEP_S} for rank in slow}
        found = [detector.observe(block(number, 4, changes, **{DATA: 0.01})) for number in range(5)]
        assert bool(found[3]) is is_found
    assert found[3] == []
    detector = StarvationDetector()
    found = [detector.observe(block(number, 2, {1: {DATA: 0.3 * STEP_S}}, **{DATA: 0.01})) for number in range(5)]
    assert found[4] == [], "one rank of two"


def uneven(rank: int, number: int, *, slowest: int | None) -> dict[str, float | Statistics]:
    """Work that varies by a factor of 2 between steps; `slowest` has a higher mean in all blocks."""
    mean = 0.12 + 0.01 * (rank == (number * 7 % 4 if slowest is None else slowest))
    return {WORK: Statistics(mean, 0.08, 0.18, 0.12, 0.17), EXPOSED: Statistics(0.19 - mean, 0.004, 0.1, 0.06, 0.1)}


VARIES, STEADY = Statistics(0.1, 0.06, 0.15, 0.1, 0.15), Statistics(*[0.1] * 5)


def imbalance(cpu: Statistics, waits: Callable[[int, int], float], *, blocks: int = 8, ranks: int = 8) -> list[Verdict]:
    """The verdicts of the last of some blocks; `waits` returns the wait for a CPU of a rank in a block."""
    detector = ImbalanceDetector()
    found: list[Verdict] = []
    for number in range(blocks):
        changes = {rank: uneven(rank, number, slowest=None) | {CPU_WAIT: waits(rank, number)} for rank in range(ranks)}
        found = detector.observe(block(number, ranks, changes, **{WORK_CPU: cpu}))  # type: ignore[arg-type]
    return found


def test_work_that_varies_between_steps_is_imbalance_if_another_rank_is_last_each_time() -> None:
    (verdict,) = imbalance(VARIES, lambda rank, number: 0.001, ranks=4)
    assert verdict.kind is VerdictKind.IMBALANCE and (verdict.cause, verdict.ranks, verdict.host) == ("work", (), "")


def test_work_is_not_said_to_differ_while_its_cpu_time_is_steady() -> None:
    (verdict,) = imbalance(STEADY, lambda rank, number: 0.001)
    assert verdict.kind is VerdictKind.IMBALANCE and (verdict.cause, verdict.host) == ("", "")
    assert "--exclude" not in verdict.change and "samples" not in verdict.change


@pytest.mark.parametrize("cpu", [VARIES, STEADY])
def test_ranks_that_wait_for_cpus_are_not_said_to_differ_in_work_and_no_equal_node_is_named(cpu: Statistics) -> None:
    """CPU time of equal work varies, too, on CPUs that are shared; one of two nodes always waits a little longer."""
    for waits in (
        lambda rank, number: 0.03 + 0.01 * (rank // 4),
        lambda rank, number: 0.08 * (rank // 4 == number % 2),
    ):
        (verdict,) = imbalance(cpu, waits)
        assert (verdict.kind, verdict.cause, verdict.host) == (VerdictKind.CONTENTION, "neighbours", "")
        assert "--exclude" not in verdict.change and "work differs" not in verdict.message


def test_the_node_whose_cpus_are_busy_in_most_blocks_is_named_unless_it_is_the_only_one() -> None:
    def waits(rank: int, number: int) -> float:
        return 0.04 if rank >= 4 and number != 5 else 0.002

    (verdict,) = imbalance(STEADY, waits)
    assert (verdict.kind, verdict.host) == (VerdictKind.CONTENTION, "n1") and "--exclude n1" in verdict.change
    (verdict,) = imbalance(STEADY, lambda rank, number: 0.04, ranks=4)
    assert verdict.host == "" and "--exclude" not in verdict.change


def test_stages_of_a_pipeline_that_wait_for_the_first_one_are_not_imbalance() -> None:
    detector = ImbalanceDetector({rank: rank // 4 for rank in range(8)})
    for number in range(12):
        ranks = {rank: uneven(rank, number, slowest=None) for rank in range(8)}
        for rank in range(4):
            ranks[rank][EXPOSED] = 0.005
        assert detector.observe(block(number, 8, ranks)) == []  # type: ignore[arg-type]


def test_a_rank_that_is_always_last_and_a_slow_network_are_not_imbalance() -> None:
    same_rank, network = ImbalanceDetector(), ImbalanceDetector()
    for number in range(12):
        assert same_rank.observe(block(number, 4, {rank: uneven(rank, number, slowest=2) for rank in range(4)})) == []  # type: ignore[misc]
        waiting = Statistics(0.06, 0.004, 0.2, 0.05, 0.15)  # communication that varies, at steady work
        assert network.observe(block(number, 4, **{EXPOSED: waiting})) == []


def saved(number: int, longest_s: float) -> list[Verdict | object]:
    return [block(number, 4, **{SAVE: Statistics(longest_s / 50, 0, longest_s, 0, 0)})]


def test_a_save_is_slow_relative_to_the_previous_ones_and_normal_again_after_the_next() -> None:
    detector = SaveDetector()
    times = {10: 6.0, 20: 6.5, 30: 6.2, 40: 20.0, 50: 6.0}
    kinds = [
        [
            one.kind
            for one in detector.observe(
                block(number, 4, **{SAVE: Statistics(times.get(number, 0) / 50, 0, times.get(number, 0), 0, 0)})
            )
        ]
        for number in range(60)
    ]
    assert [number for number, found in enumerate(kinds) if found] == list(range(40, 50))


def test_saves_that_use_more_than_a_twentieth_of_an_hour_are_reported_with_their_cost() -> None:
    detector = SaveDetector()
    for number in range(120):
        found = detector.observe(block(number, 4, **{SAVE: Statistics(2 / 50, 0, 2, 0, 0)}))
    (verdict,) = found
    assert verdict.kind is VerdictKind.SAVE_SHARE and verdict.cost_s_per_hour == pytest.approx(240)
    assert "checkpoint.every_steps" in verdict.change

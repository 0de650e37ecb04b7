"""Stragglers: the right rank or node, the cause that the numbers show, and what must not raise a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from step_windows import STEP_S, block

from toolkit.metrics.blocks import StepBlock
from toolkit.metrics.detectors.straggler import StragglerDetector
from toolkit.metrics.limits import LIMITS
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind
from toolkit.metrics.windows import CPU_WAIT, DATA, FAULTS, FORWARD, STEP, WORK, WORK_CPU

WORK_S = 0.9 * STEP_S
CPU = {WORK_CPU: 0.8 * STEP_S, DATA: 0.0, CPU_WAIT: 0.001, FAULTS: 0.0, FORWARD: 0.06}


def judge(
    changes: Mapping[int, Mapping[str, float]], *, ranks: int = 8, blocks: int = 6, peers: Mapping[int, int] | None = None,
    **metrics: float,
) -> list[Verdict]:  # fmt: skip
    """The verdicts of the last of some blocks."""
    detector = StragglerDetector(peers)
    found: list[Verdict] = []
    for number in range(blocks):
        found = detector.observe(block(number, ranks, changes, **metrics))
    return found


@pytest.mark.parametrize(("ranks", "first"), [(2, 5), (3, 4), (4, 4), (8, 4), (64, 4), (1024, 5)])
def test_a_rank_that_works_longer_is_named_after_enough_blocks(ranks: int, first: int) -> None:
    slow = {1: {WORK: 1.3 * WORK_S}}
    assert judge(slow, ranks=ranks, blocks=first - 1) == []
    (verdict,) = judge(slow, ranks=ranks, blocks=first)
    assert (verdict.kind, verdict.ranks, verdict.host) == (VerdictKind.STRAGGLER, (1,), "n0")
    assert verdict.evidence["excess"] == pytest.approx(0.3, abs=0.04)


def test_ranks_that_differ_by_noise_are_not_stragglers() -> None:
    for ranks in (1, 2, 3, 8, 64):
        assert judge({}, ranks=ranks, blocks=12, **CPU) == []


def test_the_cost_is_what_the_job_would_gain_without_the_rank() -> None:
    (verdict,) = judge({1: {WORK: 1.5 * WORK_S}})
    gain_s = 1.5 * WORK_S - 1.02 * WORK_S
    assert verdict.cost_s_per_hour == pytest.approx(3600 * gain_s / STEP_S, rel=0.05)
    assert verdict.severity is Severity.CRITICAL
    (cheap,) = judge({1: {WORK: 1.5 * WORK_S}, 2: {WORK: 1.5 * WORK_S}})[:1]
    assert cheap.severity is Severity.INFO  # the job would wait for the other slow rank


@pytest.mark.parametrize(
    ("own", "cause", "expected"),
    [
        (
            {WORK_CPU: 1.1 * STEP_S, FORWARD: 0.12},
            "own_work",
            "computes 33 % longer than the others, most of it in forward",
        ),
        ({CPU_WAIT: 0.05, WORK_CPU: 0.85 * STEP_S}, "neighbours", "because other processes use its CPUs"),
        ({CPU_WAIT: 0.05, DATA: 0.04}, "neighbours", "because other processes use its CPUs"),
        ({FAULTS: 40.0}, "memory", "waiting for memory pages from disk"),
        ({DATA: 0.06}, "data", "waiting for data"),
        ({}, "paused", "without using its CPU"),
    ],
)
def test_the_recorded_numbers_name_the_cause(own: dict[str, float], cause: str, expected: str) -> None:
    (verdict,) = judge({3: {WORK: WORK_S + 0.06, **own}}, **CPU)
    assert verdict.cause == cause and expected in verdict.message
    assert "--exclude n0" in verdict.change


def test_without_waits_for_a_cpu_a_pause_is_not_known() -> None:
    cpu = {name: value for name, value in CPU.items() if name != CPU_WAIT}
    (verdict,) = judge({3: {WORK: WORK_S + 0.06}}, **cpu)
    assert verdict.cause == "" and "without using its CPU" not in verdict.message


def test_cpu_time_finds_what_a_busy_node_hides_in_wall_time() -> None:
    """On a node with neighbours, the wall time of all ranks varies; only the CPU time of rank 0 is higher in each block."""
    detector = StragglerDetector()
    found: list[Verdict] = []
    for number in range(6):
        noise = {rank: {WORK: WORK_S * (1 + 0.5 * ((rank + 2 * number) % 4 == 1))} for rank in range(4)}
        noise[0] = {WORK: 1.2 * WORK_S + (number % 2) * 0.1, WORK_CPU: 0.125}
        found += detector.observe(block(number, 4, noise, **{WORK_CPU: 0.1}))
    assert {(one.ranks, one.cause) for one in found} == {((0,), "own_work")}


def test_cpu_time_that_costs_nothing_is_not_a_straggler() -> None:
    """Rank 0 logs and launches more, but its GPU work takes as long as that of the others."""
    assert judge({0: {WORK_CPU: 1.5 * 0.8 * STEP_S}}, **CPU) == []


def test_a_slow_node_is_reported_once_and_not_as_its_ranks() -> None:
    slow = {rank: {WORK: 1.2 * WORK_S} for rank in range(4, 8)}
    (verdict,) = judge(slow, ranks=32)
    assert (verdict.kind, verdict.host, verdict.ranks) == (VerdictKind.SLOW_NODE, "n1", (4, 5, 6, 7))
    assert verdict.cost_s_per_hour > 400


def test_a_slow_rank_does_not_make_its_node_slow() -> None:
    (verdict,) = judge({5: {WORK: 2 * WORK_S}}, ranks=16)
    assert (verdict.kind, verdict.ranks) == (VerdictKind.STRAGGLER, (5,))


def test_pipeline_stages_with_more_work_are_not_stragglers() -> None:
    slow = {rank: {WORK: 1.4 * WORK_S} for rank in (6, 7)}
    slow[1] = {WORK: 1.3 * WORK_S}
    peers = {rank: rank // 6 for rank in range(8)}
    assert [one.ranks for one in judge(slow, peers=peers)] == [(1,)]


def test_ranks_that_come_and_go_keep_the_history_of_the_others() -> None:
    detector = StragglerDetector()
    found: list[Verdict] = []
    for number, ranks in enumerate((range(4), range(4), range(6), range(1, 6), range(1, 6))):
        found = detector.observe(block(number, list(ranks), {3: {WORK: 1.3 * WORK_S}}))
    assert [one.ranks for one in found] == [(3,)]


def test_all_limits_have_a_unit_and_a_rate() -> None:
    assert all(row.unit and row.meaning and row.false_alarms for row in LIMITS.values())


def test_the_rank_that_is_stopped_is_named_where_all_ranks_share_few_cpus() -> None:
    """Four ranks on two processors: rank 1 is stopped half of the time, the work of all others varies more than that."""
    detector = StragglerDetector()
    found: list[Verdict] = []
    for number in range(6):
        ranks = {
            rank: {WORK: 0.15 + 0.03 * ((rank + number) % 3), CPU_WAIT: 0.04 + 0.03 * ((rank + number) % 3)}
            for rank in (0, 2, 3)
        }
        ranks[1] = {WORK: 0.24, CPU_WAIT: 0.03}
        found = detector.observe(block(number, 4, ranks, **{WORK_CPU: 0.1, STEP: 0.25}))
    (verdict,) = found
    assert (verdict.ranks, verdict.cause) == ((1,), "paused")


@pytest.mark.parametrize(
    "own", [{WORK: 0.24, WORK_CPU: 0.2, CPU_WAIT: 0.002}, {WORK: 0.24, WORK_CPU: 0.17, CPU_WAIT: 0.06}]
)
def test_only_a_job_of_several_nodes_is_advised_to_exclude_one(own: dict[str, float]) -> None:
    for ranks, is_advised in ((4, False), (8, True)):
        (verdict,) = judge({1: own}, ranks=ranks, **CPU)
        assert ("--exclude n0" in verdict.change) is is_advised


def test_a_rank_that_computes_longer_is_named_on_a_node_with_busy_neighbours_too() -> None:
    busy = {WORK: 1.3 * WORK_S, CPU_WAIT: 0.3 * WORK_S}
    changes = {2: busy, 3: {**busy, WORK: 1.8 * WORK_S, WORK_CPU: 1.6 * STEP_S}}
    detector, found = StragglerDetector(), []
    for number in range(6):
        slots = block(number, 4, changes, **CPU).windows
        found = detector.observe(StepBlock(tuple(replace(one, host=f"n{one.rank // 2}") for one in slots)))
    assert {(one.kind, one.ranks, one.cause) for one in found} == {
        (VerdictKind.SLOW_NODE, (2, 3), "neighbours"), (VerdictKind.STRAGGLER, (3,), "own_work"),
    }  # fmt: skip


def test_cpu_time_must_differ_more_while_ranks_wait_for_cpus() -> None:
    """Caches and CPUs that are shared stretch the CPU time of equal work by 10 to 20 %."""
    for wait_s, excess, is_found in ((0.001, 0.2, True), (0.3, 0.2, False), (0.3, 1.0, True)):
        cpu_s = 0.1 * (1 + excess)
        changes = {1: {WORK: 0.5 + 0.1 * excess, WORK_CPU: cpu_s}}
        found = judge(changes, ranks=4, **CPU | {WORK: 0.5, WORK_CPU: 0.1, CPU_WAIT: wait_s, STEP: 0.6})
        assert [one.ranks for one in found] == [(1,)] * is_found


def test_a_node_is_not_slow_because_its_ranks_pause_a_little() -> None:
    changes = {rank: {WORK: 1.02 * WORK_S, WORK_CPU: 0.5 * STEP_S} for rank in (0, 1, 2, 3)}
    assert judge(changes, ranks=8, **CPU) == []


def test_no_rank_or_node_is_named_for_neighbors_that_all_of_them_have() -> None:
    busy = CPU | {WORK: 1.4 * WORK_S, CPU_WAIT: 0.3 * WORK_S}
    more = {WORK: 1.6 * WORK_S, CPU_WAIT: 0.5 * WORK_S}
    assert judge({1: more}, ranks=4, **busy) == []
    assert judge(dict.fromkeys(range(4), more), ranks=8, **busy) == []

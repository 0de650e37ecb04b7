"""Detectors of samples: memory, loss, GPUs, links, clocks; and of missing steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from step_windows import NOW_S, STEP_S, window

from toolkit.metrics.detectors.disk import DiskDetector
from toolkit.metrics.detectors.loss import LossDetector
from toolkit.metrics.detectors.memory_leak import MemoryLeakDetector
from toolkit.metrics.detectors.network import SlowLinkDetector
from toolkit.metrics.detectors.nodes import ClockDetector, GpuDetector, LinkDetector
from toolkit.metrics.detectors.stall import StallDetector
from toolkit.metrics.samples import ClockSample, DiskSample, GpuSample, LinkSample, LossSample, MemorySample
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind
from toolkit.metrics.windows import BYTES, CPU_WAIT, EXPOSED, SAVE, STEP, WORK, Statistics

GIB = 2**30


def memory(
    used: Callable[[float], float],
    *,
    hours: float = 1,
    ranks: int = 1,
    free: float = 16 * GIB,
    left_s: float | None = None,
) -> list[Verdict]:
    """The first leaks of ranks that use this much memory at a time; they share `free` bytes."""
    detector = MemoryLeakDetector()
    for number in range(int(hours * 360)):
        grown = sum(used(10.0 * number) - used(0) for _ in range(ranks))
        samples = [
            MemorySample(10.0 * number, "n0", rank, "host", used(10.0 * number), free - grown) for rank in range(ranks)
        ]
        if found := detector.observe(samples, walltime_left_s=left_s):
            return found
    return []


def test_a_leak_is_found_within_25_min_with_the_time_to_the_limit() -> None:
    (verdict,) = memory(lambda time_s: 4 * GIB + 2e6 * time_s)
    left_s = verdict.evidence["seconds_to_limit"]
    assert left_s == pytest.approx(16 * GIB / 2e6 - 1190, rel=0.05)
    assert verdict.ranks == (0,) and "grows by 6.7 GiB per hour and reaches the limit in 2 h" in verdict.message


def test_leaking_ranks_of_a_node_share_its_memory() -> None:
    found = memory(lambda time_s: 4 * GIB + 1e6 * time_s, ranks=8)
    assert len(found) == 8
    left_s = 16 * GIB / 8e6 - 1190
    assert all(one.severity is Severity.CRITICAL for one in found)
    assert found[0].evidence["seconds_to_limit"] == pytest.approx(left_s, rel=0.05)


def test_a_leak_that_reaches_the_limit_within_15_min_is_found_within_4_min() -> None:
    (verdict,) = memory(lambda time_s: 4 * GIB + 2e7 * time_s, hours=240 / 3600)
    assert verdict.evidence["seconds_to_limit"] == pytest.approx(16 * GIB / 2e7 - 200, rel=0.05)


def test_growth_that_does_not_reach_the_limit_in_the_walltime_is_no_leak() -> None:
    assert memory(lambda time_s: 4 * GIB + 2e6 * time_s, left_s=3600) == []
    assert memory(lambda time_s: 4 * GIB + 2e4 * time_s) == []


@pytest.mark.parametrize(
    "used",
    [
        lambda time_s: 4 * GIB + 5e6 * min(time_s, 600),  # a cache that fills up
        lambda time_s: 4 * GIB + 2 * GIB * (time_s % 700) / 700,  # garbage collection
        lambda time_s: 4 * GIB + 3e8 * (time_s // 1300),  # plateaus
    ],
)
def test_memory_that_settles_is_no_leak(used: Callable[[float], float]) -> None:
    assert memory(used, hours=2) == []


def loss_kinds(losses: list[float]) -> list[str]:
    detector = LossDetector()
    return [
        "".join(one.kind for one in detector.observe(LossSample(step, step, loss))) for step, loss in enumerate(losses)
    ]


def noisy(count: int, level: float = 2.0) -> list[float]:
    draw = random.Random(3)
    return [level * draw.gauss(1, 0.02) for _ in range(count)]


def test_a_spike_is_reported_in_its_step_and_does_not_hide_the_next() -> None:
    losses = noisy(400)
    losses[200], losses[210] = 3.5, 3.5
    assert [step for step, kind in enumerate(loss_kinds(losses)) if kind == "loss_spike"] == [200, 210]


def test_a_loss_that_stays_high_diverges_and_one_that_returns_does_not() -> None:
    assert loss_kinds(noisy(200) + noisy(140, 4.0))[-1] == "divergence"
    assert "divergence" not in loss_kinds(noisy(200) + noisy(60, 4.0) + noisy(300))


def test_a_divergence_is_over_when_the_loss_returns() -> None:
    kinds = loss_kinds(noisy(200) + noisy(140, 4.0) + noisy(200))
    assert "divergence" in kinds and kinds[-1] == ""


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_names_the_first_rank_and_step(loss: float) -> None:
    detector = LossDetector()
    detector.observe(LossSample(1, 1, 2.0))
    (verdict,) = detector.observe(LossSample(2, 2, loss, (5,), "n1"))
    assert (verdict.kind, verdict.ranks, verdict.first_step) == (VerdictKind.LOSS_NOT_FINITE, (5,), 2)
    assert f"the loss of rank 5 on node n1 is {loss} in step 2, its first value" in verdict.message
    assert detector.observe(LossSample(3, 3, loss))[0].ranks == (5,)
    assert detector.observe(LossSample(4, 4, 2.0)) == []


def test_negative_and_zero_losses_are_judged_by_their_size() -> None:
    assert set(loss_kinds([-value for value in noisy(300)])) == {""}
    assert set(loss_kinds([0.0] * 300)) == {""}


def stall(
    seconds: float, *, step: Statistics | float = STEP_S, paused: bool = False, **metrics: Statistics
) -> list[Verdict]:
    """The verdicts `seconds` after the last finished step of 4 ranks; rank 2 did not finish it."""
    detector = StallDetector()
    slots = [window(rank, 0, steps=45 if rank == 2 else 50, **{STEP: step}, **metrics) for rank in range(4)]
    assert detector.observe(slots, now_s=NOW_S + 10) == []
    return detector.observe([], now_s=NOW_S + 10 + seconds, is_paused=paused)


def test_a_stall_names_the_rank_that_did_not_finish_the_step() -> None:
    assert stall(29) == []
    (verdict,) = stall(31)
    assert verdict.ranks == (2,) and verdict.severity is Severity.WARNING
    assert "rank 2 on node n0 did not finish step 50" in verdict.message
    assert stall(130)[0].severity is Severity.CRITICAL


def test_a_stall_of_a_program_that_reports_every_tenth_step_names_the_last_one() -> None:
    detector = StallDetector()
    slots = [replace(window(rank, steps=5), first_step=10, last_step=50 - 10 * (rank == 1)) for rank in range(2)]
    detector.observe(slots, now_s=NOW_S + 10)
    (verdict,) = detector.observe([], now_s=NOW_S + 60)
    assert "rank 1 on node n0 did not finish step 50" in verdict.message and verdict.last_step == 50


def test_ranks_that_have_not_written_their_last_short_steps_are_not_named() -> None:
    detector = StallDetector()
    slots = [replace(window(rank, **{STEP: 0.06}), last_step=100 + 8 * (rank == 1)) for rank in range(2)]
    detector.observe(slots, now_s=NOW_S + 10)
    (verdict,) = detector.observe([], now_s=NOW_S + 60)
    assert verdict.ranks == () and "did not finish" not in verdict.message


def test_long_steps_extend_the_stall_limit_but_saves_do_not() -> None:
    assert stall(90, step=10.0) == [] and stall(101, step=10.0)
    once = Statistics(1.0, 0.1, 60.0, 0.2, 0.3)
    assert stall(110, step=once) == []
    assert stall(110, step=once, **{SAVE: Statistics(1.0, 0, 59.0, 0, 0)})
    assert stall(500, paused=True) == []


def test_a_rank_that_left_the_job_does_not_appear_in_a_later_stall() -> None:
    detector = StallDetector()
    detector.observe([window(0, 0), window(1, 0, steps=20)], now_s=NOW_S + 10)
    for number in range(1, 40):
        detector.observe([window(0, number)], now_s=NOW_S + 10 * number + 10)
    assert detector.observe([], now_s=NOW_S + 500)[0].ranks == ()


def gpu(number: int, **changes: object) -> GpuSample:
    return GpuSample(
        **{
            "time_s": 10.0 * number,
            "host": "n1",
            "gpu": 2,
            "ranks": (6,),
            "busy": 0.9,
            "temperature_c": 60.0,
            "hot_c": 90.0,
        }
        | changes
    )  # type: ignore[arg-type]


def test_an_idle_gpu_is_reported_after_five_minutes_only_while_steps_continue() -> None:
    for has_steps, is_found in ((True, True), (False, False)):
        detector = GpuDetector()
        found = [bool(detector.observe(gpu(number, busy=0.01), has_steps=has_steps)) for number in range(40)]
        assert found == [is_found and number >= 30 for number in range(40)]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"throttle": ("hw_thermal",)}, VerdictKind.GPU_THROTTLED), ({"temperature_c": 89.0}, VerdictKind.GPU_HOT)],
)
def test_two_samples_in_a_row_show_a_hot_or_throttled_gpu(changes: dict[str, object], kind: VerdictKind) -> None:
    detector = GpuDetector()
    series = [changes, {}, changes, changes]
    found = [detector.observe(gpu(number, **one), has_steps=True) for number, one in enumerate(series)]
    assert [len(one) for one in found] == [0, 0, 0, 1]
    assert (found[3][0].kind, found[3][0].device, found[3][0].ranks) == (kind, "gpu 2", (6,))


def test_only_memory_errors_of_this_attempt_count() -> None:
    detector = GpuDetector()
    assert detector.observe(gpu(0, ecc_errors=7), has_steps=True) == []
    (verdict,) = detector.observe(gpu(1, ecc_errors=9), has_steps=True)
    assert verdict.kind is VerdictKind.GPU_ECC and "2 uncorrected" in verdict.message


def test_link_errors_count_if_they_grow_now() -> None:
    detector = LinkDetector()
    errors = [500] * 10 + [505, 511] + [511] * 70
    found = [
        bool(detector.observe(LinkSample(10.0 * number, "n1", "mlx5_0", count))) for number, count in enumerate(errors)
    ]
    assert found[10:13] == [False, True, True] and not found[-1]
    assert detector.observe(LinkSample(9000, "n1", "mlx5_0", 0)) == []  # reset by an administrator
    assert detector.observe(LinkSample(9010, "n1", "mlx5_0", 0, downs=1))


def test_a_clock_is_compared_with_those_of_most_nodes() -> None:
    detector = ClockDetector()
    found = [detector.observe(ClockSample(0, f"n{number}", 3.0 if number == 2 else 0.01)) for number in range(5)]
    assert [bool(one) for one in found] == [False, False, True, False, False]
    assert "node n2 is 3 s ahead" in found[2][0].message
    assert detector.observe(ClockSample(1, "n3", 0.9, uncertainty_s=1.0)) == []


COMMUNICATION_S = 0.01


def links(
    least_s: Callable[[int], float], *, slots: int = 30, nodes: int = 2, **metrics: Callable[[int], float]
) -> list[int]:
    """The slots in which a slow link is found; ranks of a node deliver after those of the node before."""
    detector, found = SlowLinkDetector(), []
    for number in range(slots):
        values = {name: value(number) for name, value in metrics.items()}
        for node in range(nodes):
            ranks = [
                window(
                    rank, number, **{EXPOSED: Statistics(0.1, least_s(number) * (1 + rank), 0.3, 0.1, 0.2), **values}
                )
                for rank in range(4 * node, 4 * node + 4)
            ]
            for verdicts in detector.observe(ranks):
                found += [
                    number for one in verdicts if one.kind is VerdictKind.SLOW_LINK and not one.ranks and not one.host
                ]
    return found


def later(usual: float, then: float) -> Callable[[int], float]:
    return lambda number: usual if number < 15 else then


def test_communication_that_became_slow_for_the_same_data_is_a_slow_link_until_it_is_fast_again() -> None:
    assert links(later(COMMUNICATION_S, 0.05), **{BYTES: later(1e6, 1e6)}) == list(range(17, 30))
    assert links(lambda number: 0.05 if 15 <= number < 20 else COMMUNICATION_S) == [17, 18, 19]


def test_more_data_busy_processors_and_single_windows_are_no_slow_link() -> None:
    assert links(later(COMMUNICATION_S, 0.05), **{BYTES: later(1e6, 4e6)}) == []
    assert links(later(COMMUNICATION_S, 0.05), **{WORK: later(0.1, 0.4)}) == [], (
        "larger samples; bytes are not recorded"
    )
    assert links(later(COMMUNICATION_S, 0.05), **{WORK: later(0.1, 0.4), BYTES: later(1e6, 1e6)}) != []
    assert links(later(COMMUNICATION_S, 0.05), **{CPU_WAIT: later(0.001, 0.06)}) == []
    assert links(lambda number: 0.05 if number % 3 else COMMUNICATION_S) == []
    assert links(later(0.0001, 0.001)) == [], "a small part of the step"
    assert links(later(0.05, 0.05)) == [], "slow from the beginning"


def test_waiting_for_a_late_rank_is_no_slow_link() -> None:
    """All ranks but one wait for it; that one only communicates."""
    detector = SlowLinkDetector()
    for number in range(30):
        waits = 0.08 if number >= 15 else COMMUNICATION_S
        ranks = [window(rank, number, **{EXPOSED: COMMUNICATION_S if rank == 2 else waits}) for rank in range(4)]
        assert [one for found in detector.observe(ranks) for one in found] == []


def test_a_full_file_system_is_critical_and_little_space_a_warning() -> None:
    gib = 2**30
    for sample, severity in (
        (DiskSample(0, "/r", 0, 64 << 20, full="No space left on device"), Severity.CRITICAL),
        (DiskSample(0, "/r", 4000 * gib, 10**6 * gib, full="Disk quota exceeded"), Severity.CRITICAL),
        (DiskSample(0, "/r", 2 << 20, 64 << 20), Severity.WARNING),
        (DiskSample(0, "/r", 9 * gib, 1000 * gib), Severity.WARNING),
        (DiskSample(0, "/r", 9 * gib, 10 * gib, free_inodes=0.005), Severity.WARNING),
        (DiskSample(0, "/r", 11 * gib, 1000 * gib), None),
        (DiskSample(0, "/r", 6 << 20, 64 << 20), None),
    ):
        found = DiskDetector().observe(sample)
        assert [one.severity for one in found] == ([severity] if severity else []), sample
        assert all(one.kind is VerdictKind.DISK and sample.full in one.message for one in found)

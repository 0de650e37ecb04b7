"""All detectors together: what the supervisor writes while a job runs."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from step_windows import NOW_S, STEP_S, window

from toolkit.metrics.judge import Detectors, OpenVerdicts
from toolkit.metrics.samples import GpuSample, LossSample, MemorySample, Sample
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, open_verdicts, raise_verdict
from toolkit.metrics.windows import (
    CPU_WAIT,
    DEVICE,
    DEVICE_PEAK,
    EXPOSED,
    LOSS,
    NOT_FINITE_AFTER,
    WORK,
    WORK_CPU,
    Statistics,
    Window,
)

ROOT = Path(__file__).resolve().parents[2]


def run(
    detectors: Detectors, numbers: range, *, ranks: int = 8, slow: range = range(0), **metrics: float
) -> list[Verdict]:
    """The lines of slots `numbers`; rank 5 works 40 % longer in the slots of `slow`."""
    lines = []
    for number in numbers:
        slots = []
        for rank in range(ranks):
            factor = 1 + 0.005 * ((7 * rank + 3 * number) % 5) + 0.4 * (rank == 5 and number in slow)
            slots.append(window(rank, number, **{WORK: 0.7 * STEP_S * factor, **metrics}))
        lines += detectors.observe(slots, now_s=NOW_S + 10 * number + 12)
    return lines


def test_a_fault_is_raised_once_and_cleared_once() -> None:
    lines = run(Detectors(3), range(60), slow=range(10, 40))
    assert [(one.kind, one.ranks, one.state, one.attempt) for one in lines] == [
        (VerdictKind.STRAGGLER, (5,), "raised", 3), (VerdictKind.STRAGGLER, (5,), "cleared", 3),
    ]  # fmt: skip
    assert lines[0].time < lines[1].time and open_verdicts(lines, attempt=3) == []


def test_a_fault_that_comes_and_goes_does_not_flap() -> None:
    opened = OpenVerdicts(clear_after=5)
    fault = raise_verdict(VerdictKind.STRAGGLER, Severity.INFO, "", "", ranks=[1], time_s=0)
    changes = [opened.update([fault] if number % 4 == 0 else [], number) for number in range(40)]
    assert [bool(one) for one in changes] == [True] + [False] * 39


def test_a_verdict_that_becomes_more_severe_is_raised_again() -> None:
    opened = OpenVerdicts(clear_after=1)
    states = []
    for severity in (Severity.INFO, Severity.CRITICAL, Severity.WARNING, None):
        found = [raise_verdict(VerdictKind.STALL, severity, "", "", time_s=0)] if severity else []
        states.append([(one.severity, one.state) for one in opened.update(found, 0)])
    assert states == [[("info", "raised")], [("critical", "raised")], [], [("critical", "cleared")]]


def test_a_fault_of_all_ranks_is_one_verdict() -> None:
    detectors = Detectors(1)
    run(detectors, range(1), ranks=64)
    lines = []
    for number in range(3):
        hot: list[Sample] = [
            GpuSample(NOW_S + number, f"n{rank // 4}", rank % 4, (rank,), 0.9, 95.0, 90.0) for rank in range(64)
        ]
        lines += detectors.observe([], hot, now_s=NOW_S + 12)
    (verdict,) = lines
    assert verdict.ranks == tuple(range(64)) and "the same holds for 63 others" in verdict.message


def test_ranks_that_join_and_leave_raise_nothing() -> None:
    detectors = Detectors(1)
    lines = run(detectors, range(12)) + run(detectors, range(12, 30), ranks=4) + run(detectors, range(30, 50), ranks=16)
    assert lines == []


def test_a_straggler_explains_the_waiting_which_is_cleared_and_not_raised_again() -> None:
    """Rank 5 computes longer from slot 10 on, while another rank is last in each slot."""

    def slots(number: int) -> list[Window]:
        found = []
        for rank in range(8):
            work_s = 0.12 + 0.01 * (rank == number * 7 % 8) + 0.006 * (rank == 5)
            varies, cpu_s = Statistics(work_s, 0.08, 0.2, work_s, 0.19), 0.1 + 0.05 * (rank == 5 and number >= 10)
            exposed = Statistics(0.19 - work_s, 0.004, 0.1, 0.06, 0.1)
            found.append(window(rank, number, **{WORK: varies, WORK_CPU: cpu_s, EXPOSED: exposed, CPU_WAIT: 0.0}))
        return found

    detectors, lines = Detectors(1), []
    for number in range(40):
        lines += detectors.observe(slots(number), now_s=NOW_S + 10 * number + 12)
    assert [(one.kind.value, one.state) for one in lines] == [
        ("load_imbalance", "raised"), ("straggler", "raised"), ("load_imbalance", "cleared"),
    ]  # fmt: skip


def test_a_verdict_whose_rank_is_only_known_when_it_becomes_worse_replaces_the_first_one() -> None:
    known: list[tuple[int, ...]] = [(3,), ()]
    opened = OpenVerdicts(1, lambda verdict: replace(verdict, ranks=known.pop()))
    lines = []
    for severity in (Severity.WARNING, Severity.CRITICAL, None):
        found = [raise_verdict(VerdictKind.STALL, severity, "", "", time_s=0)] if severity else []
        lines += opened.update(found, 0)
    assert [(one.ranks, one.state) for one in lines] == [
        ((), "raised"), ((), "cleared"), ((3,), "raised"), ((3,), "cleared"),
    ]  # fmt: skip
    assert open_verdicts(lines, attempt=0) == []


def test_a_slow_rank_that_leaves_is_cleared() -> None:
    detectors = Detectors(1)
    lines = run(detectors, range(12), slow=range(12)) + run(detectors, range(12, 40), ranks=4)
    assert [(one.ranks, one.state) for one in lines] == [((5,), "raised"), ((5,), "cleared")]


def test_a_stall_begins_and_ends_with_the_steps() -> None:
    detectors = Detectors(1)
    run(detectors, range(10))
    lines = [one for number in range(10, 16) for one in detectors.observe([], now_s=NOW_S + 10 * number + 2)]
    lines += run(detectors, range(16, 18))
    assert [(one.kind, one.state) for one in lines] == [(VerdictKind.STALL, "raised"), (VerdictKind.STALL, "cleared")]


def test_a_loss_that_only_the_ring_has_is_judged_too() -> None:
    detectors = Detectors(1)
    assert run(detectors, range(3), **{LOSS: 2.0}) == []
    (verdict,) = run(detectors, range(3, 5), **{LOSS: math.nan})
    assert (verdict.kind, verdict.severity) == (VerdictKind.LOSS_NOT_FINITE, Severity.CRITICAL)
    assert verdict.ranks == () and "rank" not in verdict.message, "all ranks have it at once, so none caused it"


def bad(rank: int, number: int, after: int) -> Window:
    return window(rank, number, **{LOSS: math.nan, NOT_FINITE_AFTER: float(after)})


def test_the_rank_whose_loss_was_first_not_finite_is_named_although_its_node_delivers_later() -> None:
    """Rank 5 has it in step 220; the exchange of gradients gives it to all others in step 221."""
    detectors = Detectors(1)
    assert run(detectors, range(4), **{LOSS: 2.0}) == []
    early = detectors.observe([bad(rank, 4, 20) for rank in range(4)], now_s=NOW_S + 52)
    late = detectors.observe([bad(rank, 4, 20 - (rank == 5)) for rank in range(4, 8)], now_s=NOW_S + 62)
    after = detectors.observe([bad(rank, 5, 0) for rank in range(8)], now_s=NOW_S + 72)
    (verdict,) = [*early, *late, *after]
    assert early == [] and (verdict.ranks, verdict.host, verdict.first_step) == ((5,), "n1", 220)
    assert "rank 5 on node n1 is nan in step 220" in verdict.message


def test_a_loss_that_is_not_finite_does_not_wait_long_for_a_node_that_is_silent() -> None:
    detectors = Detectors(1)
    run(detectors, range(4), **{LOSS: 2.0})
    assert detectors.observe([bad(rank, 4, 20 + rank) for rank in range(4)], now_s=NOW_S + 52) == []
    (verdict,) = [one for one in detectors.observe([], now_s=NOW_S + 90) if one.kind is VerdictKind.LOSS_NOT_FINITE]
    assert (verdict.ranks, verdict.first_step) == ((0,), 221)


def test_no_rank_is_named_for_the_loss_of_the_job() -> None:
    """Toolkit's loop reports the mean over the ranks, which is also in their rings."""
    detectors = Detectors(1)
    samples = [LossSample(0, step, 2.0) for step in range(1, 200, 10)]
    lines = detectors.observe([window(rank, 3, **{LOSS: 2.0}) for rank in range(4)], samples, now_s=NOW_S + 42)
    ring = [bad(rank, 4, 10 + rank) for rank in range(4)]
    lines += detectors.observe(ring, [LossSample(0, 211, math.nan)], now_s=NOW_S + 52)
    (verdict,) = lines
    assert (verdict.ranks, verdict.host, verdict.first_step) == ((), "", 211)
    assert verdict.message.startswith("the loss is nan in step 211")


def test_what_torch_caches_on_a_gpu_is_not_in_use() -> None:
    """The process uses 90 of 100 bytes; torch has allocated at most `peak` of them, and caches the rest."""
    for peak, expected in (
        (50.0, []),
        (85.0, [("memory_pressure", "warning")]),
        (None, [("memory_pressure", "warning")]),
    ):
        detectors = Detectors(1)
        metrics = {} if peak is None else {DEVICE: 40.0, DEVICE_PEAK: peak}
        sample = MemorySample(NOW_S, "n0", 0, "gpu 0", 90, 10)
        lines = detectors.observe([window(0, 0, **metrics)], [sample], now_s=NOW_S + 12)
        assert [(one.kind, one.severity) for one in lines] == expected
        if peak:
            assert all(one.evidence == {"used_bytes": peak, "limit_bytes": 100} for one in lines)


def test_the_loss_log_replaces_the_means_of_slots() -> None:
    """A spike of one step in the log is found, and the mean of the same slot is not judged again."""
    detectors = Detectors(1)
    lines = []
    for number in range(10):
        losses = [
            LossSample(0, 50 * number + step, 9.0 if (number, step) == (8, 7) else 2 + step / 500) for step in range(50)
        ]
        lines += detectors.observe([window(0, number, **{LOSS: 50.0})], losses, now_s=NOW_S + 10 * number + 12)
    assert [(one.kind, one.first_step) for one in lines] == [(VerdictKind.LOSS_SPIKE, 407)]


@pytest.mark.parametrize("ranks", [2, 1024])
def test_a_call_costs_little_beside_the_ten_seconds_between_calls(ranks: int) -> None:
    import time

    detectors = Detectors(1)
    began = time.process_time()
    run(detectors, range(8), ranks=ranks)
    assert (time.process_time() - began) / 8 < 1.0


def test_the_benchmark_reproduces_the_tables() -> None:
    """`benchmarks/detectors.py --quick` finds a rank that is 50 % slower in 5 to 6 blocks, without false alarms."""
    import json

    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "detectors.py", "--quick"], capture_output=True, text=True, check=True,
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    cells = json.loads(done.stdout.splitlines()[-1])["cells"]
    slow = [one for one in cells if one["table"] == "straggler" and one["fault"] == "+50 %"]
    assert len(slow) == 6 and all(one["missed"] == 0 and one["worst"] <= 300 for one in slow)
    assert sum(one["false_alarms"] for one in cells) == 0

"""All detectors together: what the supervisor writes while a job runs."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from step_windows import NOW_S, STEP_S, window

from toolkit.metrics.judge import Detectors, OpenVerdicts
from toolkit.metrics.samples import GpuSample, LossSample, Sample
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, open_verdicts, raise_verdict
from toolkit.metrics.windows import LOSS, WORK

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

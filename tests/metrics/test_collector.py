"""The collector: steps in slots of the wall clock."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace

import pytest

from toolkit.metrics.collector import Collector
from toolkit.metrics.ring import ABSENT, WIDTH, Ring, RingReader
from toolkit.metrics.windows import LOSS, NOT_FINITE_AFTER, STEP, merge


@pytest.fixture
def node(tmp_path):
    """Two rings, and their readers."""
    rings = [Ring(tmp_path / f"{rank}.ring", "run", 0, rank) for rank in range(2)]
    yield rings, [RingReader(ring.path) for ring in rings]
    for ring in rings:
        ring.close()


def append(ring: Ring, ended_s: float, step: int, **values: float) -> None:
    row = [ABSENT] * WIDTH
    for name, value in values.items():
        row[ring.column(name)] = value
    ring.append(ended_s, step, row)


def test_windows_are_the_same_slots_on_all_ranks(node):
    rings, readers = node
    collector = Collector("host")
    for number in range(50):
        append(rings[0], 1000.5 + number, number, step_s=1.0)
        append(rings[1], 1003.5 + number, number, step_s=2.0)
    windows = [window for now in range(1000, 1070) for window in collector.collect(readers, float(now))]
    assert [(one.rank, one.began_s, one.first_step, one.steps) for one in windows if one.began_s < 1020] == [
        (0, 1000, 0, 10), (1, 1000, 0, 7), (0, 1010, 10, 10), (1, 1010, 7, 10),
    ]  # fmt: skip
    assert sum(one.steps for one in windows) == 100
    assert {one.seconds for one in windows} == {10}
    assert {one.host for one in windows} == {"host"}
    assert windows[0].mean(STEP) == 1.0


def test_the_end_of_a_run_closes_the_open_slot(node):
    rings, readers = node
    append(rings[0], 1000.0, 1, step_s=1.0)
    collector = Collector("host")
    assert collector.collect(readers, 1010.5) == []  # steps may still come late
    assert [window.steps for window in collector.collect(readers, math.inf)] == [1]
    assert collector.collect(readers, math.inf) == []


def test_late_steps_and_a_clock_that_is_set_back_lose_no_step(node):
    rings, readers = node
    collector = Collector("host")
    for ended_s in (1005.0, 1015.0, 900.0, 1016.0):
        append(rings[0], ended_s, 1, step_s=1.0)
    found = collector.collect(readers, 1012.0)
    append(rings[0], 1004.0, 2, step_s=1.0)  # its slot has been cut
    found += collector.collect(readers, 1100.0)
    assert sum(window.steps for window in found) == 5
    assert [window.began_s for window in found] == sorted({window.began_s for window in found})


def test_a_nan_makes_the_mean_nan_and_names_its_step(node):
    rings, readers = node
    for number, loss in enumerate((1.0, math.nan, 3.0)):
        append(rings[0], 1000.0 + number, number, loss=loss)
    append(rings[1], 1000.0, 0, loss=math.nan)
    first, second = Collector("host").collect(readers, math.inf)
    assert math.isnan(first.metrics[LOSS].mean)
    assert (first.metrics[LOSS].minimum, first.metrics[LOSS].maximum) == (1.0, 3.0)
    assert math.isnan(second.metrics[LOSS].maximum)
    assert (first.first_step + first.mean(NOT_FINITE_AFTER), second.mean(NOT_FINITE_AFTER)) == (1, 0)
    assert set(first.metrics) == {LOSS, NOT_FINITE_AFTER}
    later = replace(first, began_s=1010.0, first_step=10, last_step=12)
    assert merge([replace(first, metrics={}, last_step=-1, first_step=-3), later]).mean(NOT_FINITE_AFTER) == 10 + 1 - -3


def test_a_metric_that_appears_later_does_not_disturb_the_slot(node):
    rings, readers = node
    collector = Collector("host")
    append(rings[0], 1000.0, 0, step_s=1.0)
    assert collector.collect(readers, 1000.5) == []
    append(rings[0], 1001.0, 1, step_s=1.0, reward=4.0)
    (window,) = collector.collect(readers, 1020.0)
    assert (window.steps, window.mean("reward"), window.mean(STEP)) == (2, 4.0, 1.0)


def test_a_damaged_ring_is_reported_once_and_the_others_are_read(node, capsys):
    rings, readers = node
    append(rings[1], 1000.0, 0, step_s=1.0)
    os.truncate(readers[0].path, 100)
    collector = Collector("host")
    assert [window.rank for _ in range(3) for window in collector.collect(readers, math.inf)] == [1]
    assert capsys.readouterr().err.count("truncated") == 1


def test_reading_100_new_steps_of_8_ranks_takes_less_than_a_millisecond(tmp_path):
    rings = [Ring(tmp_path / f"{rank}.ring", "run", 0, rank) for rank in range(8)]
    readers = [RingReader(ring.path) for ring in rings]
    collector, taken = Collector("host"), []
    for _ in range(20):
        for ring in rings:
            for number in range(100):
                ring.append(1000.0 + number / 100, number, [1.0] * WIDTH)
        began = time.thread_time()
        collector.collect(readers, 1001.0)
        taken.append(time.thread_time() - began)
    assert min(taken) < 0.001

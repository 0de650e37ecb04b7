"""What the page, the report and the terminal show of a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from step_windows import NOW_S, window

from toolkit.metrics.checkpoints import SaveRecord
from toolkit.metrics.training import TrainRecord
from toolkit.metrics.verdicts import Severity, VerdictKind, raise_verdict
from toolkit.metrics.window_file import WindowFile
from toolkit.metrics.windows import DATA, FORWARD, RSS, STEP, TOKENS, WORK, Window
from toolkit.observe.readings import RunReadings
from toolkit.observe.view import MOST_EVENTS, MOST_ROWS, SCALE, view_of
from toolkit.observe.window_grid import COLUMNS, WindowGrid
from toolkit.rundir.attempt_records import StartRecord
from toolkit.rundir.claims import claim_attempt


@pytest.fixture
def readings(run_directory) -> RunReadings:
    """Two nodes with two ranks each; rank 3 is slow in the last two of four slots."""
    attempt = claim_attempt(run_directory)
    StartRecord(0, "1", 2, 4, "2026-11-24T00:00:00Z").write(attempt)
    for node in (0, 1):
        ranks = (2 * node, 2 * node + 1)
        WindowFile(attempt.windows_file(2 * node), f"n{node}").append(
            window(
                rank,
                slot,
                **{
                    WORK: 0.3 if rank == 3 and slot > 1 else 0.1,
                    RSS: 1e9 * (rank + 1),
                    TOKENS: 100.0,
                    DATA: 0.01,
                    FORWARD: 0.05,
                },
            )
            for slot in range(4)
            for rank in ranks
        )
    found = RunReadings(run_directory, grid=WindowGrid())
    found.update()
    return found


def record(step: int, loss: float) -> TrainRecord:
    return TrainRecord(step, 900, loss, loss.hex(), 0.1, 1.0, step, step, 0.2, 1.0, "2026-11-24T00:00:00Z", 0, 4)


def test_the_heat_map_shows_the_slow_rank(readings):
    view = view_of(readings)
    heat = view["heats"]["work"]
    assert [len(row) for row in heat["cells"]] == [4] * 4
    assert heat["cells"][3] == [0, 0, SCALE, SCALE] and heat["cells"][0] == [0] * 4
    assert (heat["least"], heat["most"]) == (pytest.approx(0.1), pytest.approx(0.3))
    assert view["spread"]["rank"][-1] == 3
    assert view["spread"]["slowest"] == pytest.approx([0.1, 0.1, 0.3, 0.3]) and view["spread"][
        "median"
    ] == pytest.approx([0.1] * 4)
    assert view["hosts"] == ["n0", "n0", "n1", "n1"]
    assert view["metrics"] == ["work", "step", "data", "memory"]
    assert list(view_of(readings, ["memory", "nonsense"])["heats"]) == ["memory"]


def test_rate_memory_and_parts(readings):
    readings.saves.append(SaveRecord(100, "every_s", 2.0, 2.0, 1, None, None, "2027-01-15T08:00:15Z", 0))
    assert readings.saves[0].began_at == NOW_S + 13
    view = view_of(readings)
    assert (view["unit"], view["rate"]) == ("tokens/s", pytest.approx([2000.0] * 4))  # 4 ranks, 100 tokens, 5 steps/s
    assert view["memory"] == {"n1": pytest.approx([7e9] * 4), "n0": pytest.approx([3e9] * 4)}
    assert view["parts"]["save"] == pytest.approx([0, 0.04, 0, 0])  # 2 s of 50 steps
    assert view["parts"]["other"] == pytest.approx([0.14, 0.10, 0.14, 0.14])


def test_a_run_without_windows_or_records_has_an_empty_view(run_directory):
    readings = RunReadings(run_directory, grid=WindowGrid())
    readings.update()
    view = json.loads(json.dumps(view_of(readings), allow_nan=False))
    assert (view["heats"], view["spread"], view["loss"], view["memory"], view["times"]) == ({}, {}, {}, {}, [])


def test_losses_are_bounded_and_not_finite_ones_are_null(readings):
    readings.training = [record(step, math.inf if step == 3000 else 5 - step / 1000) for step in range(1, 3001)]
    loss = view_of(readings)["loss"]
    assert len(loss["step"]) == COLUMNS and loss["mean"][-1] is None
    assert loss["slope"] == pytest.approx(-0.001, rel=1e-3)
    assert loss["trend"][0] is None and loss["trend"][-2] == pytest.approx(loss["mean"][-2], rel=1e-3)
    readings.training = [record(1, math.nan)]
    json.dumps(view_of(readings), allow_nan=False)


def test_events_are_sorted_and_bounded(readings):
    verdict = raise_verdict(VerdictKind.STALL, Severity.CRITICAL, "no step", "look", time_s=NOW_S + 5)
    readings.verdicts = [verdict] + [replace(verdict, state="cleared")] * 300
    view = view_of(readings)
    assert len(view["events"]) == MOST_EVENTS and view["events"][-1][1:] == ("verdict", "critical: no step: look")
    readings.verdicts = [verdict]
    view = view_of(readings)
    assert [kind for _, kind, _ in view["events"]] == ["attempt", "verdict"]
    assert view["events"][0][2] == "0 started: 4 ranks, 2 nodes"
    assert [one["message"] for one in view["verdicts"]] == ["no step"]


def test_the_view_of_many_ranks_is_bounded(run_directory):
    attempt, ranks = claim_attempt(run_directory), 2 * MOST_ROWS
    windows = [
        Window(rank, "n0", NOW_S, 10, 1, 5, 5, window(0, **{STEP: 9.0 if rank == 777 else 1.0}).metrics)
        for rank in range(ranks)
    ]
    WindowFile(attempt.windows_file(0), "n0", bytes_per_rank=10**6).append(windows)
    readings = RunReadings(run_directory, grid=WindowGrid())
    readings.update()
    heat = view_of(readings, ["step"])["heats"]["step"]
    assert (len(heat["cells"]), heat["ranks_per_row"]) == (MOST_ROWS, 2)
    assert [row for row, (cell,) in enumerate(heat["cells"]) if cell == SCALE] == [777 // 2]

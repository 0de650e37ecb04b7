"""The heat map of `watch`: readable in a terminal of any width, also without colors."""

from __future__ import annotations

import pytest
from step_windows import window

from toolkit.metrics.window_file import WindowFile
from toolkit.metrics.windows import WORK
from toolkit.observe.readings import RunReadings
from toolkit.observe.window_grid import WindowGrid
from toolkit.rundir.claims import claim_attempt
from toolkit.runs.follow.heat import ROWS, heat_of


@pytest.fixture
def readings(run_directory):
    """24 ranks, of which rank 20 is slow from the 30th of 60 slots on; rank 3 has no window after the 10th."""
    file = WindowFile(claim_attempt(run_directory).windows_file(0), "node17", bytes_per_rank=10**6)
    file.append(
        window(rank, slot, **{WORK: 0.5 if rank == 20 and slot >= 30 else 0.1})
        for slot in range(60)
        for rank in range(24)
        if rank != 3 or slot < 10
    )
    found = RunReadings(run_directory, grid=WindowGrid())
    found.update()
    return found


@pytest.mark.parametrize(("unicode", "low", "high"), [(True, "▁", "█"), (False, ".", "#")])
def test_the_slow_rank_is_visible_without_colors(readings, unicode, low, high):
    title, *rows = heat_of(readings, 200, unicode=unicode).plain.splitlines()
    assert title == "work of the slowest 16 of 24 ranks, 0.1 to 0.5 s" and len(rows) == ROWS
    (slow,) = (row for row in rows if row.split()[0] == "20")
    assert slow == f"    20 node17       {low * 30}{high * 30}"
    assert all(high not in row for row in rows if row is not slow)


def test_it_fits_the_width_and_shows_gaps(readings):
    lines = heat_of(readings, 50, unicode=True).plain.splitlines()
    assert max(map(len, lines[1:])) == 49
    assert heat_of(readings, 5, unicode=True)
    readings.grid.hosts  # noqa: B018
    gap = [row for row in heat_of(readings, 200, unicode=True).plain.splitlines() if row.startswith("     3 ")]
    assert gap in ([], ["     3 node17       " + "▁" * 10 + " " * 50])


def test_a_run_without_windows_has_none(run_directory):
    assert not heat_of(RunReadings(run_directory, grid=WindowGrid()), 100, unicode=True)

"""The grid has the means of the same windows that `WindowReader.new` returns, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from step_windows import NOW_S, same, window

from toolkit.metrics.window_file import WindowFile, WindowReader
from toolkit.metrics.windows import RSS, STEP, WORK
from toolkit.observe.window_grid import AT, COLUMNS, PACE, WindowGrid


def filled(path, windows, grid=None, **options):
    file = WindowFile(path, "n0", **options)
    file.append(windows)
    grid, reader = grid or WindowGrid(), WindowReader(path)
    grid.add(reader.contents(), reader.names, reader.host)
    return grid, reader, file


def test_cells_are_the_means_of_windows(tmp_path):
    windows = [window(rank, slot, **{WORK: 0.1 + rank / 10 + slot}) for slot in range(3) for rank in (0, 2)]
    windows.append(window(1, 1, **{RSS: 5e9}))  # another size of record, and a metric that the others lack
    grid, _, _ = filled(tmp_path / "rank-00000.bin", windows)
    assert grid.times == [NOW_S, NOW_S + 10, NOW_S + 20]
    assert grid.means(WORK)[2].tolist() == pytest.approx([0.3, 1.3, 2.3])
    assert np.isnan(grid.means(WORK)[1, [0, 2]]).all() and grid.means(RSS)[1, 1] == pytest.approx(5e9)
    assert (grid.means(PACE)[0, 0], grid.means(AT)[0, 1]) == (pytest.approx(0.2), pytest.approx(75.5))
    assert grid.hosts == {0: "n0", 1: "n0", 2: "n0"}


def test_a_long_run_keeps_exact_means_in_the_same_columns(tmp_path):
    count = 3 * COLUMNS
    values = [float(slot % 7) for slot in range(count)]
    windows = [window(0, slot, **{STEP: value}) for slot, value in enumerate(values)]
    grid, _, _ = filled(tmp_path / "rank-00000.bin", windows, bytes_per_rank=10**6)
    assert (grid.slot_s, len(grid.times)) == (40.0, count // 4)
    assert grid.means(STEP)[0].tolist() == pytest.approx(np.reshape(values, (-1, 4)).mean(axis=1), rel=1e-5)


def test_a_replaced_file_adds_nothing_twice_and_long_windows_leave_no_gaps(tmp_path):
    path, grid = tmp_path / "rank-00000.bin", WindowGrid()
    file, reader = WindowFile(path, "n0", bytes_per_rank=8000), WindowReader(path)
    for slot in range(200):  # the file is compacted several times
        file.append([window(0, slot, steps=50)])
        grid.add(reader.contents(), reader.names, reader.host)
    assert reader.replacements > 1
    assert grid._sums[1, 0].sum() == 200 * 50
    late, again = WindowGrid(), WindowReader(path)  # reads the merged windows only
    late.add(again.contents(), again.names, again.host)
    assert late._sums[1, 0].sum() == 200 * 50 and np.isfinite(late.means(STEP)).all()


def test_values_that_are_not_finite_stay_in_their_cell(tmp_path):
    grid, _, _ = filled(
        tmp_path / "rank-00000.bin", [window(0, slot, **{WORK: same([1.0, np.nan, 3.0][slot])}) for slot in range(3)]
    )
    assert np.isnan(grid.means(WORK)[0]).tolist() == [False, True, False]

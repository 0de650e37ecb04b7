"""The file of windows: bounded, merged without losing steps, readable while it is written."""

from __future__ import annotations

import errno
import math
import os
import random
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.metrics.window_file import WindowFile, WindowReader, read_windows
from toolkit.metrics.windows import LOSS, STEP, Statistics, Window


def window(number: int, rank: int = 0, steps: int = 10, value: float = 1.0, **more: float) -> Window:
    metrics = {STEP: value, **more}
    statistics = {name: Statistics(one, one, one, one, one) for name, one in metrics.items()}
    return Window(rank, "node7", 1000.0 + 10 * number, 10.0, number * 10, number * 10 + steps - 1, steps, statistics)


def test_windows_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "windows.bin"
    file = WindowFile(path, "node7")
    written = [window(0, loss=math.nan), window(0, rank=1), window(1, value=0.5, reward=-math.inf)]
    file.append(written[:2])
    file.append([])
    file.append(written[2:])
    found = read_windows(path)
    assert math.isnan(found[0].mean(LOSS))
    assert found[1:] == written[1:]


def test_a_file_is_bounded_after_10_000_windows(tmp_path):
    path = tmp_path / "windows.bin"
    file = WindowFile(path, "node7")
    largest = 0
    for number in range(10_000):
        file.append([window(number, value=number % 7, loss=1.0, reward=2.0)])
        largest = max(largest, path.stat().st_size)
    found = read_windows(path)
    assert largest <= 180_000
    assert sum(one.steps for one in found) == 100_000
    ends = [one.began_s + one.seconds for one in found]
    assert all(end <= later.began_s for end, later in zip(ends, found[1:], strict=False))
    assert [one.seconds for one in found[-100:]] == [10.0] * 100  # the newest are not merged
    assert max(one.seconds for one in found) < 100_000 / 10  # nor is all of the past one window
    assert found[0].began_s == 1000.0


@pytest.mark.parametrize("seed", range(10))
def test_merged_windows_have_the_totals_of_their_parts(tmp_path, seed):
    numbers = random.Random(seed)
    path = tmp_path / "windows.bin"
    file, reader = WindowFile(path, "node7", bytes_per_rank=3000), WindowReader(path)
    written: list[Window] = []
    read: list[Window] = []
    for number in range(600):
        if numbers.random() < 0.1:
            continue
        new = [
            window(number, rank, numbers.randrange(1, 100), numbers.uniform(0.01, 10))
            for rank in range(3)
            if numbers.random() < 0.9
        ]
        file.append(new)
        written += new
        if numbers.random() < 0.3 or number % 5 == 0:
            read += reader.new()
    read += reader.new()
    for rank in range(3):
        before, after = ([one for one in some if one.rank == rank] for some in (written, read_windows(path)))
        assert len(after) < len(before)
        assert sum(one.steps for one in after) == sum(one.steps for one in before)
        total = sum(one.steps * one.mean(STEP) for one in before)
        assert sum(one.steps * one.mean(STEP) for one in after) == pytest.approx(total, rel=1e-5)
        for pick, field in ((min, "minimum"), (max, "maximum")):
            assert pick(getattr(one.metrics[STEP], field) for one in after) == pytest.approx(
                pick(getattr(one.metrics[STEP], field) for one in before), rel=1e-6
            )
        # A reader that keeps up gets each window once and unmerged.
        assert [(one.began_s, one.steps) for one in read if one.rank == rank] == [
            (one.began_s, one.steps) for one in before
        ]
    assert path.stat().st_size <= 3 * 3000


def test_a_reader_waits_for_the_rest_of_a_torn_record_and_a_new_writer_removes_it(tmp_path):
    path = tmp_path / "windows.bin"
    reader = WindowReader(path)
    assert reader.new() == []
    file = WindowFile(path, "node7")
    file.append([window(0)])
    whole = path.read_bytes()
    file.append([window(1), window(2)])
    data = path.read_bytes()
    for size in range(len(whole), len(data)):
        path.write_bytes(data[:size])
        assert [one.began_s for one in read_windows(path)] in ([1000.0], [1000.0, 1010.0])
    path.write_bytes(data[:-3])
    assert [one.began_s for one in reader.new()] == [1000.0, 1010.0]
    again = WindowFile(path, "node7")
    again.append([window(3)])
    assert [one.began_s for one in reader.new()] == [1030.0]
    assert [one.began_s for one in read_windows(path)] == [1000.0, 1010.0, 1030.0]


def test_a_foreign_file_is_reported(tmp_path):
    path = tmp_path / "windows.bin"
    path.write_bytes(b"something else" * 100)
    with pytest.raises(ToolkitError, match="not a file of windows"):
        read_windows(path)
    path.write_bytes(b"")
    assert read_windows(path) == []


def test_windows_wait_while_the_disk_is_full(tmp_path, monkeypatch, capsys):
    path = tmp_path / "windows.bin"
    file = WindowFile(path, "node7")
    with monkeypatch.context() as full:

        def refuse(*_given: object, **_named: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(Path, "open", refuse)
        file.append([window(0)])
        file.append([window(1)])
    file.append([window(2)])
    assert [one.began_s for one in read_windows(path)] == [1000.0, 1010.0, 1020.0]
    assert capsys.readouterr().err.count("cannot write") == 1

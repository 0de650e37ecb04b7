"""The ring of a rank: what readers get while it is written, and after its rank has been killed."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ring_rows import rows_of

from toolkit.errors import ToolkitError
from toolkit.metrics import ring as ring_module
from toolkit.metrics.ring import ABSENT, CAPACITY, RECORD, WIDTH, Ring, RingReader, unused_rings
from toolkit.metrics.windows import BYTES, COLUMNS, LOSS, STEP
from toolkit.supervise.shared_memory import remove_left_behind


@pytest.fixture
def ring(tmp_path):
    ring = Ring(tmp_path / f"toolkit-{os.geteuid()}-run-000-3.ring", "run", 0, 3)
    yield ring
    ring.close()


def append(ring: Ring, numbers: range) -> None:
    for number in numbers:
        ring.append(float(number), number, [float(number)] * WIDTH)


def test_a_reader_gets_each_step_once_with_what_it_reported(ring):
    reader = RingReader(ring.path)
    assert (reader.rank, reader.attempt, reader.run_id) == (3, 0, "run")
    values = [ABSENT] * WIDTH
    values[COLUMNS.index(STEP)], values[COLUMNS.index(LOSS)] = 0.5, math.nan
    values[ring.column("reward")] = math.inf
    ring.append(100.0, 7, values)
    steps = reader.new()
    assert (steps.numbers(), steps.ended_s(), steps.values(STEP), steps.values("reward")) == (
        [7],
        [100.0],
        [0.5],
        [math.inf],
    )
    assert math.isnan(steps.values(LOSS)[0])
    assert steps.values(BYTES) == steps.values("unknown") == []
    assert set(rows_of(steps)[0]) == {"ended_s", "step", STEP, LOSS, "reward"}
    assert len(reader.new()) == 0
    assert RingReader(ring.path).new().numbers() == [7]


def test_a_full_ring_keeps_the_newest_steps(ring):
    reader = RingReader(ring.path)
    append(ring, range(100))
    assert reader.new().numbers() == list(range(100))
    append(ring, range(100, 3 * CAPACITY))
    found = reader.new()
    assert found.numbers() == list(range(2 * CAPACITY + 1, 3 * CAPACITY))
    assert found.values(STEP) == [float(number) for number in found.numbers()]


def test_a_value_that_is_not_a_32_bit_float_is_limited(ring):
    reader = RingReader(ring.path)
    ring.append(0.0, 0, [1e300, -1e300, math.nan] + [1.0] * (WIDTH - 3))
    assert reader.new().values(COLUMNS[0]) == [pytest.approx(3.4e38, rel=0.01)]


def write_until_killed(path: Path) -> None:
    ring = Ring(path, "run", 0, 0)
    number = 0
    while True:
        ring.append(float(number), number, [float(number % 65536)] * WIDTH)
        number += 1


def test_a_reader_never_sees_a_torn_step_while_another_process_writes(tmp_path):
    path = tmp_path / "toolkit-0-run-000-0.ring"
    writer = multiprocessing.get_context("spawn").Process(target=write_until_killed, args=(path,))
    writer.start()
    try:
        reader = opened(path)
        seen, last, lost, end, pause_s = 0, -1, 0, time.monotonic() + 3, 0.001
        while time.monotonic() < end or (lost == 0 and pause_s < 20):
            if time.monotonic() >= end:  # give the writer time to overtake the reader, as a busy machine may not have
                time.sleep(pause_s)
                pause_s *= 2
            steps = reader.new()
            numbers = steps.numbers()
            assert numbers == sorted(set(numbers))
            for column in (COLUMNS[0], COLUMNS[-1]):
                assert steps.values(column) == [float(number % 65536) for number in numbers]
            lost += numbers[0] - last - 1 if numbers else 0
            seen, last = seen + len(numbers), numbers[-1] if numbers else last
        assert seen > CAPACITY
        assert lost > 0, "the writer never overtook the reader"
    finally:
        writer.kill()
        writer.join()


def opened(path: Path) -> RingReader:
    for _ in range(200):
        try:
            return RingReader(path)
        except FileNotFoundError:
            time.sleep(0.05)
    raise AssertionError(f"no ring {path}")


def test_a_ring_is_for_its_user_only_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        ring = Ring(tmp_path / "a.ring", "run", 0, 0)
    finally:
        os.umask(before)
    assert stat.S_IMODE(ring.path.stat().st_mode) == 0o600
    ring.close()


def test_a_second_process_of_a_rank_gets_no_ring_and_the_next_one_replaces_it(ring):
    with pytest.raises(FileExistsError):
        Ring(ring.path, "run", 0, 3)
    left = ring.path.with_name("left.ring")
    Ring(left, "run", 0, 3).close()
    again = Ring(left, "run", 0, 3)
    assert RingReader(left).new().numbers() == []
    again.close()


PROGRAM = """
import sys, time
from toolkit.metrics.ring import Ring
ring = Ring.of_rank("run-left-behind", 0, 5)
print(ring.path, flush=True)
time.sleep(100)
"""


def test_a_ring_is_removed_after_kill_9_and_not_before(ring):
    rank = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    path = Path(rank.stdout.readline().strip())
    try:
        assert path.parent == Path("/dev/shm")
        assert path not in unused_rings()
        assert remove_left_behind(0.0, ring.path.parent) == []
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
    assert path in unused_rings()
    assert path.name in remove_left_behind(math.inf)
    assert not path.exists()


def test_without_free_shared_memory_the_ring_is_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_module, "_folders", lambda: (tmp_path / "missing", tmp_path))
    ring = Ring.of_rank("run", 0, 1)
    assert ring.path.parent == tmp_path
    with pytest.raises(FileExistsError):  # not in the next folder: the rank has a ring
        Ring.of_rank("run", 0, 1)
    ring.close()
    monkeypatch.setattr(ring_module, "_folders", lambda: (tmp_path / "missing",))
    with pytest.raises(OSError, match="No such file"):
        Ring.of_rank("run", 0, 1)


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "short":
        data = data[: len(data) // 2]
    elif how == "foreign":
        data[:8] = b"ELF 1234"
    elif how == "columns":
        data[16] = 5
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["short", "foreign", "columns", "link", "folder"])
def test_a_file_that_is_not_a_ring_is_reported(ring, how):
    if how in ("link", "folder"):
        path = ring.path.with_name("other.ring")
        path.symlink_to(ring.path) if how == "link" else path.mkdir()
    else:
        path = ring.path
        damage(path, how)
    with pytest.raises(ToolkitError, match="cannot read the steps of a rank"):
        RingReader(path)


@pytest.mark.parametrize(("at", "value"), [(128, 2**40), (128, 1), (136, 99), (4096 + 16, 77)])
def test_a_ring_that_is_damaged_later_is_reported(ring, at, value):
    append(ring, range(10))
    reader = RingReader(ring.path)
    if value == 1:  # fewer records than before
        reader.new()
    with ring.path.open("r+b") as stream:
        stream.seek(at)
        stream.write(value.to_bytes(8, "little"))
    with pytest.raises(ToolkitError, match=r"not consecutive|columns, got|records, got"):
        reader.new()
    assert RECORD % 8 == 0


def test_a_truncated_ring_is_reported(ring):
    append(ring, range(10))
    reader = RingReader(ring.path)
    os.truncate(ring.path, 4096)
    with pytest.raises(ToolkitError, match="truncated"):
        reader.new()


def test_a_ring_that_is_being_created_does_not_exist_yet(tmp_path):
    path = tmp_path / "new.ring"
    path.touch()
    with pytest.raises(FileNotFoundError):
        RingReader(path)

"""A file of records over torn lines and a disk that is full for a while."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.metrics.checkpoints import SaveLog, SaveRecord, read_save_log
from toolkit.metrics.validation import ValidationLog, ValidationRecord, last_validation, read_validations


def record(step: int, **other) -> SaveRecord:
    given = {"why": "every_s", "waited_s": 0.5, "committed_s": 0.5, "bytes": 10, "error": None, "metric": None}
    return SaveRecord(step=step, time="2026-01-01T00:00:00.000+00:00", attempt=0, **(given | other))


def test_saves_are_read_as_they_were_written_and_half_a_line_is_none(tmp_path):
    path = tmp_path / "metrics" / "checkpoints.jsonl"
    assert read_save_log(path) == []
    wanted = [record(1), record(1, error="full", committed_s=None, bytes=None), record(2, metric=0.1)]
    with SaveLog(path) as log:
        for each in wanted:
            log.write(each)
    with path.open("a") as stream:
        stream.write(record(3).to_line()[:30])
    assert read_save_log(path) == wanted
    with SaveLog(path) as log:
        log.write(record(3, metric=math.nan))
    assert read_save_log(path) == [*wanted, record(3)]


@pytest.mark.parametrize("line", ["{}", "[]", "5", '{"step": "x"}', "nonsense"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "checkpoints.jsonl"
    path.write_text(f"{record(1).to_line()}\n{line}\n")
    with pytest.raises(ToolkitError, match=r"checkpoints\.jsonl:2: not a save record"):
        read_save_log(path)


def test_a_line_that_is_not_utf_8_is_named(tmp_path):
    path = tmp_path / "checkpoints.jsonl"
    path.write_bytes(record(1).to_line().encode() + b"\n\xff\xfe{}\n")
    with pytest.raises(ToolkitError, match=r"checkpoints\.jsonl:2: not a save record"):
        read_save_log(path)


def test_a_deeply_nested_last_line_is_not_a_record(tmp_path):
    path = tmp_path / "validation.jsonl"
    path.write_text("[" * 100_000 + "\n")
    assert last_validation(path) is None


def validation(step: int, **other) -> ValidationRecord:
    given = {"means": {"loss": float(step)}, "average": False, "attempt": 0}
    return ValidationRecord(step, 10, time="2026-01-01T00:00:00.000+00:00", **(given | other))


def test_validations_that_the_run_went_back_over_are_dropped_and_the_last_line_is_found(tmp_path):
    path = tmp_path / "validation.jsonl"
    assert last_validation(path) is None
    again = validation(4, attempt=1, means={"loss": math.nan}, stopped="no better")
    with ValidationLog(path) as log:
        for each in (validation(2), validation(4), validation(6), again):
            log.write(each)
    first, second = read_validations(path)
    assert first == validation(2)
    assert (second.step, second.attempt, second.stopped) == (4, 1, "no better") and math.isnan(second.means["loss"])
    assert last_validation(path).as_json() == second.as_json() and second.as_json()["means"] == {"loss": None}
    path.write_text(path.read_text().replace(', "stopped": ""', "").partition("\n")[0] + "\n")
    assert last_validation(path) == validation(2), "a line of before there was a word of early stopping"


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    filling = folder / "filling"
    with filling.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space"):
        while True:
            stream.write(bytes(512))
    return filling


def test_lines_wait_for_room_on_a_full_disk_and_that_is_said_once(small_disk: Path, capsys):
    path = small_disk / "checkpoints.jsonl"
    with SaveLog(path) as log:
        log.write(record(0))
        filling = fill(small_disk)
        for step in range(1, 101):
            log.write(record(step))
        kept = len(read_save_log(path))
        assert path.read_bytes().endswith(b"\n") and kept < 100
        filling.unlink()
        log.write(record(101))
    assert [each.step for each in read_save_log(path)] == list(range(102))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "cannot write " in said[0] and ", will retry: " in said[0] and ": can write " in said[1]


def test_lines_are_written_at_the_end_if_there_is_room_again(small_disk: Path, capsys):
    path = small_disk / "checkpoints.jsonl"
    with SaveLog(path) as log:
        filling = fill(small_disk)
        for step in range(1, 101):
            log.write(record(step))
        log.retry()
        filling.unlink()
    assert [each.step for each in read_save_log(path)] == list(range(1, 101))
    assert capsys.readouterr().err.count("\n") == 2


def test_lines_that_never_found_room_are_counted(small_disk: Path, capsys, monkeypatch):
    monkeypatch.setattr("toolkit.metrics.records.MOST_WAITING", 50)
    path = small_disk / "checkpoints.jsonl"
    with SaveLog(path) as log:
        fill(small_disk)
        for step in range(1, 101):
            log.write(record(step))
    lost = 100 - len(read_save_log(path))
    assert lost > 50 and f"{lost} lines of" in capsys.readouterr().err

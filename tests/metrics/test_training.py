import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.metrics.training import TrainLog, TrainRecord, read_train_log


def record(step: int, *, loss: float = 1.5, attempt: int = 0, grad_norm: float = 0.5) -> TrainRecord:
    return TrainRecord(
        step=step, steps=100, loss=loss, loss_hex=float(loss).hex(), lr=1e-3, grad_norm=grad_norm,
        samples=step * 8, tokens=step * 64, seconds=0.5, tokens_per_s=128.0,
        time="2026-01-01T00:00:00.000+00:00", attempt=attempt, world=4,
    )  # fmt: skip


@given(loss=st.floats(allow_nan=False))
def test_a_loss_comes_back_to_the_last_bit(loss):
    assert TrainRecord.from_line(record(1, loss=loss).to_line()).loss.hex() == loss.hex()


def test_every_line_is_plain_json_even_when_the_loss_is_not_a_number(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = record(1, loss=math.nan, grad_norm=math.inf).to_line()
    row = json.loads(line, parse_constant=refuse)
    assert row["loss"] is None and row["loss_hex"] == "nan" and row["grad_norm"] is None
    assert math.isnan(TrainRecord.from_line(line).loss)


def test_lines_can_be_read_while_the_file_is_being_written(tmp_path):
    path = tmp_path / "metrics" / "train.jsonl"
    with TrainLog(path) as log:
        log.write(record(1))
        log.write(record(2))
        assert [one.step for one in read_train_log(path)] == [1, 2]


def test_steps_taken_again_replace_the_lines_that_the_run_went_back_over(tmp_path):
    path = tmp_path / "train.jsonl"
    with TrainLog(path) as log:
        for step in range(1, 9):
            log.write(record(step, attempt=0))
    with TrainLog(path) as log:
        for step in range(5, 7):
            log.write(record(step, attempt=1))
    assert [(one.step, one.attempt) for one in read_train_log(path)] == [
        (1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (6, 1),
    ]  # fmt: skip


def test_half_a_line_of_a_killed_writer_is_not_read_and_the_next_line_stays_whole(tmp_path):
    path = tmp_path / "train.jsonl"
    with TrainLog(path) as log:
        log.write(record(1))
    whole = path.read_bytes()
    path.write_bytes(whole + record(2).to_line()[:40].encode())
    assert [one.step for one in read_train_log(path)] == [1]
    with TrainLog(path) as log:
        log.write(record(2, attempt=1))
    assert [(one.step, one.attempt) for one in read_train_log(path)] == [(1, 0), (2, 1)]
    assert path.read_bytes().startswith(whole)


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(record(1).to_line() + "\n" + '{"step": 2}\n')
    with pytest.raises(ToolkitError, match=r"train\.jsonl:2: not a training record"):
        read_train_log(path)
    path.write_text(record(1).to_line() + "\n" + '{"step": 2,\n')
    with pytest.raises(ToolkitError, match=r"train\.jsonl:2: not a training record \(.*: column 1[12]\)"):
        read_train_log(path)

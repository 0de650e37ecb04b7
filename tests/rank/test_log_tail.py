"""What is read from a log: whole lines, of programs that print too much the newest ones, at a bounded cost."""

import os
import signal
import time

import pytest

from toolkit.metrics.ring import Ring, RingReader, rings_of
from toolkit.rank.log_tail import BURST_BYTES, LONGEST_LINE, TICK_BYTES, LogTail
from toolkit.rank.step_lines import StepLines, StepRecords
from toolkit.rank.step_patterns import Report, StepCount, StepPatterns
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import read_json, write_json
from toolkit.supervise.process_tree import running_below

STEP = r"step (?P<step>\d+)(?: loss (?P<loss>\S+))?"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "rank-0.log"
    path.touch()
    return path


def append(log, text):
    with log.open("ab") as stream:
        stream.write(text)


def test_a_line_ends_at_a_line_feed_or_carriage_return_and_loses_its_escapes(log):
    tail = LogTail(log)
    append(log, b"one\r\ntwo\r\x1b[1mthr\xff\xc3")
    assert tail.new() == ["one", "two"]
    append(log, b"\xa9e\n")
    assert tail.new() == ["thr\ufffd\xe9e"]


def test_the_text_of_a_progress_bar_is_whole_after_a_second_and_other_text_is_not(log):
    tail = LogTail(log)
    append(log, b"\r 1/9")
    assert tail.new() == []
    assert [tail.new() for _ in range(11)].count([" 1/9"]) == 1
    append(log, b"\n 2/9")
    assert [line for _ in range(15) for line in tail.new()] == []
    assert tail.new(is_over=True) == [" 2/9"]


def test_of_too_much_output_the_newest_lines_are_read(log):
    tail = LogTail(log)
    append(log, b"".join(b"%09d\n" % number for number in range(BURST_BYTES // 10 + 50_000)))
    lines = tail.new()
    assert lines[-1] == f"{BURST_BYTES // 10 + 49_999:09d}"
    assert [int(line) for line in lines] == list(range(int(lines[0]), int(lines[-1]) + 1))
    assert tail.skipped > 0
    for _ in range(3):
        append(log, b"".join(b"%09d\n" % number for number in range(5000)))
        lines = tail.new()
        assert lines[-1] == "000004999"
        assert 0 < 10 * len(lines) <= TICK_BYTES


def test_lines_that_are_longer_than_what_is_read_are_cut_and_not_lost(log):
    tail = LogTail(log)
    append(log, b"x" * (BURST_BYTES + 10))
    tail.new()
    for number in range(3):
        append(log, b"\nstep %d " % number + b"y" * (3 * TICK_BYTES))
        append(log, b"\nstep %d " % (number + 10) + b"z" * (3 * TICK_BYTES) + b"\n")
        lines = tail.new()
        assert [len(line) for line in lines] == [LONGEST_LINE] * len(lines)
        assert lines[-1].startswith(f"step {number + 10} z")


def test_a_truncated_log_and_a_moved_one_are_read_on(log):
    tail = LogTail(log)
    append(log, b"one\ntw")
    assert tail.new() == ["one"]
    os.truncate(log, 0)
    append(log, b"three\n")
    assert tail.new() == []
    os.truncate(log, 0)
    assert tail.new() == []
    append(log, b"four\n")
    assert tail.new() == ["four"]
    log.rename(log.with_suffix(".1"))
    append(log.with_suffix(".1"), b"five\n")
    assert tail.new() == ["five"]


def test_a_pattern_that_backtracks_is_cut_off_named_and_dropped(log):
    told = []
    patterns = StepPatterns([r"(a+)+b", STEP], told.append)
    for number in range(3):
        assert patterns.read("a" * 60 + f" step {number} loss -inf").step == number
    assert patterns.was_cut
    assert len(told) == 1
    assert "'(a+)+b' needed more than 50 ms" in told[0]


def test_values_that_are_no_numbers_are_ignored_and_named(log):
    told = []
    patterns = StepPatterns([r"s (?P<step>\S+) l (?P<loss>\S+)"], told.append)
    assert patterns.read("s 1,200 l n/a") == Report(1200, None, {})
    assert patterns.read("s 12k l 1E-3") == Report(None, None, {"loss": 1e-3})
    assert patterns.read("s 7; l 2.31, lr 1") == Report(7, None, {"loss": 2.31})
    assert patterns.read("s 13k l none") == Report()
    loss, step = told
    assert "the value of loss is not a number: 'n/a'" in loss
    assert "the value of step is not a whole number of up to 15 digits: '12k'" in step


@pytest.mark.parametrize(
    ("lines", "steps", "total"),
    [
        ([(1, 10), (2, 10), (1, 3), (3, 3), (3, 10)], [1, 2, 2, 2, 3], 10),  # the bar of an evaluation
        ([(9, 10), (10, 10), (1, 10), (2, 10)], [9, 10, 11, 12], None),  # the next epoch
        ([(9, 10), (10, 10), (1, 20), (11, 20)], [9, 10, 10, 11], 20),  # another program
        ([(5, None), (3, None), (6, None)], [5, 5, 6], None),
        ([(0, 10), (4, None), (5, 10)], [0, 4, 5], 10),
    ],
)
def test_steps_only_grow(lines, steps, total):
    count, found = StepCount(), []
    for number, of in lines:
        count.is_new(Report(number, of))
        found.append(count.step)
    assert (found, count.total) == (steps, total)


def test_metrics_belong_to_the_last_step_also_if_it_is_recorded_already(run_directory, log):
    attempt = claim_attempt(run_directory)
    records = StepRecords(attempt, log, {"step_line": [r"step (?P<step>\d+)", r"loss (?P<loss>\S+)"]})
    append(log, b"loss 9\nstep 1\nloss 8\nstep 2\n")
    records._read(100.0, is_over=False)
    records._read(102.0, is_over=False)
    append(log, b"loss 7\nstep 4\n")
    records._read(106.0, is_over=False)
    records._read(106.1, is_over=True)
    (path,) = rings_of(attempt.run.run_id, attempt.number, 0)
    steps = RingReader(path).new()
    path.unlink()
    assert steps.numbers() == [1, 2, 2, 4]
    assert steps.values("loss") == [8.0, 7.0]
    assert steps.values("step_s") == [3.0]  # two steps in the 6 s since step 2
    assert read_json(attempt.heartbeat)["steps_per_s"] == pytest.approx(2 / 6, rel=1e-3)
    assert read_json(attempt.heartbeat)["step"] == 4


def test_a_metric_of_the_last_rank_does_not_hide_the_steps_of_rank_0(run_directory, log, monkeypatch):
    monkeypatch.setenv("TOOLKIT_WORLD_SIZE", "4")
    attempt = claim_attempt(run_directory)
    append(attempt.log_file(3), b"lr 0.1\n")
    records = StepRecords(attempt, log, {"step_line": [STEP, r"lr (?P<lr>\S+)"], "record": False})
    records._read(records._began_at + 40, is_over=False)
    append(log, b"step 9\n")
    records._read(records._began_at + 60, is_over=True)
    assert read_json(attempt.heartbeat)["step"] == 9


def test_the_programs_own_steps_win(run_directory, log):
    attempt = claim_attempt(run_directory)
    records = StepRecords(attempt, log, {"step_line": [STEP]})
    append(log, b"step 1\nstep 2\n")
    records.read()
    own = Ring.of_rank(attempt.run.run_id, attempt.number, 0)
    write_json(attempt.heartbeat, {"step": 7, "time": "x", "saves": False})
    append(log, b"step 3\n")
    records.read(is_over=True)
    assert records.has_other_writer
    assert read_json(attempt.heartbeat)["step"] == 7
    assert rings_of(attempt.run.run_id, attempt.number) == [own.path]
    with pytest.raises(FileExistsError):
        Ring.of_rank(attempt.run.run_id, attempt.number, 0)
    own.close()
    own.path.unlink()


def test_a_write_that_fails_before_or_after_it_took_effect_does_not_end_the_reader(
    run_directory, log, monkeypatch, capsys
):
    attempt = claim_attempt(run_directory)
    records = StepRecords(attempt, log, {"step_line": [STEP], "record": False})

    def late(*arguments, **more):
        write_json(*arguments, **more)
        raise TimeoutError("timed out")

    def fail(*_arguments, **_more):
        raise OSError("full")

    for step, write in enumerate((late, fail, late, write_json)):
        monkeypatch.setattr("toolkit.rank.step_lines.write_json", write)
        append(log, b"step %d\n" % step)
        records.read(is_over=True)
    assert not records.has_other_writer
    assert read_json(attempt.heartbeat)["step"] == 3
    assert "cannot record the steps of rank 0: timed out" in capsys.readouterr().err


def test_a_step_of_too_many_epochs_is_refused(run_directory, log, capsys):
    attempt = claim_attempt(run_directory)
    pattern = r"Epoch (?P<epoch>\d+): (?P<step>\d+)/(?P<total>\d+)"
    append(log, b"Epoch 2: 45/100\nEpoch 900000000000000: 1/900000000000000\n")
    StepRecords(attempt, log, {"step_line": [pattern], "record": False}).read(is_over=True)
    assert read_json(attempt.heartbeat)["step"] == 245
    assert "the value of step is not a whole number of up to 15 digits: '81" in capsys.readouterr().err


def test_a_reader_that_hangs_does_not_detain_the_guard(run_directory, monkeypatch):
    attempt = claim_attempt(run_directory)
    attempt.log_file(0).touch()
    lines = StepLines(attempt, attempt.log_file(0))
    lines.start()
    kill = os.kill
    kill(lines._process, signal.SIGSTOP)
    monkeypatch.setattr("toolkit.rank.step_lines.END_S", 0.2)
    monkeypatch.setattr(os, "kill", lambda *_: None)  # as if it hung in the kernel
    lines.finish()
    kill(lines._process, signal.SIGKILL)
    os.waitpid(lines._process, 0)


def test_patterns_without_a_match_are_reported(run_directory, log, capsys):
    records = StepRecords(claim_attempt(run_directory), log, {"step_line": [STEP]})
    append(log, b"a\nb\n")
    records.read(is_over=True)
    assert "observe.step_line matched none of the 2 lines that were read" in capsys.readouterr().err


def test_the_process_is_not_one_of_the_program_ignores_its_signals_and_ends_at_once(run_directory):
    attempt = claim_attempt(run_directory)
    log = attempt.log_file(0)
    log.touch()
    lines = StepLines(attempt, log)
    lines.start()
    time.sleep(0.3)
    assert lines._process not in [one.pid for one in running_below(os.getpid())]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(lines._process, number)
    append(log, b"toolkit: step 5 / 9")
    lines.finish()
    assert read_json(attempt.heartbeat)["total"] == 9
    with pytest.raises(ProcessLookupError):
        os.kill(lines._process, 0)


def test_the_last_rank_is_read_if_rank_0_prints_no_steps(run_directory, log, monkeypatch):
    monkeypatch.setenv("TOOLKIT_WORLD_SIZE", "4")
    attempt = claim_attempt(run_directory)
    append(log, b"lr 0.1\n")
    append(attempt.log_file(3), b"step 5\n")
    records = StepRecords(attempt, log, {"step_line": [STEP, r"lr (?P<lr>\S+)"]})
    records._read(records._began_at + 20, is_over=False)
    assert not attempt.heartbeat.exists()
    records._read(records._began_at + 40, is_over=False)
    assert read_json(attempt.heartbeat)["step"] == 5
    append(log, b"step 9\n")
    append(attempt.log_file(3), b"step 6\n")
    records._read(records._began_at + 60, is_over=True)
    assert read_json(attempt.heartbeat)["step"] == 6
    for path in rings_of(attempt.run.run_id, attempt.number, 0):
        path.unlink()

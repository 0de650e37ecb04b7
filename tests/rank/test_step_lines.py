"""Steps that a script reports: by a call, and by lines of its output."""

import os
import subprocess
import sys

import numpy as np
import pytest

import toolkit
from toolkit.errors import ToolkitError
from toolkit.rank.step_lines import StepLines, StepRecords
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import read_json, write_json
from toolkit.world import step as step_module


def step_in(attempt):
    return read_json(attempt.heartbeat)["step"] if attempt.heartbeat.exists() else None


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("toolkit: step 7\n", 7),
        ("toolkit: step 7\ntoolkit: step 9\nloss 3\n", 9),
        ("\r 20%|##   | 1/5toolkit: step 7\n", 7),  # a progress bar does not end its line
        ("toolkit: step 7 of 9\n", None),
        ("toolkit: step seven\ntoolkit: step -1\n", None),
        ("toolkit: step 7 / 9\ntoolkit: step 8/9\n", 8),
        ("toolkit: step 7", 7),  # the last line of a rank that has exited
        ("toolkit: step 7\ntoolkit: step 8", 8),
        ("x" * 3_000_000 + "\ntoolkit: step 8\n", 8),
    ],
)
def test_the_last_whole_line_counts(run_directory, text, step):
    attempt = claim_attempt(run_directory)
    log = attempt.log_file(0)
    log.write_text(text)
    lines = StepLines(attempt, log)
    lines.start()
    lines.finish()
    assert step_in(attempt) == step


def test_a_line_that_is_being_written_does_not_count_yet(run_directory):
    attempt = claim_attempt(run_directory)
    log = attempt.log_file(0)
    log.write_text("toolkit: step 7\ntoolkit: step 1")
    records = StepRecords(attempt, log, {})
    records.read()
    assert step_in(attempt) == 7
    with log.open("a") as stream:
        stream.write("2\n")
    records.read(is_over=True)
    assert step_in(attempt) == 12


def test_only_rank_0_counts_in_a_shared_log(run_directory):
    attempt = claim_attempt(run_directory)
    log = attempt.node_log("here")
    log.write_text("[0] toolkit: step 3\n[1] toolkit: step 5\n")
    lines = StepLines(attempt, log)
    lines.start()
    lines.finish()
    assert step_in(attempt) == 3


@pytest.fixture
def in_rank(run_directory, monkeypatch):
    attempt = claim_attempt(run_directory)
    step_module.watch_of_rank.cache_clear()
    monkeypatch.setenv("TOOLKIT_RUN_DIR", str(run_directory.path))
    monkeypatch.setenv("TOOLKIT_ATTEMPT", "0")
    yield lambda rank: (monkeypatch.setenv("TOOLKIT_RANK", rank), attempt)[1]
    step_module.watch_of_rank.cache_clear()


@pytest.mark.parametrize(("rank", "step"), [("0", 4), ("1", None)])
def test_rank_0_records_the_step_that_a_script_reports(in_rank, rank, step):
    attempt = in_rank(rank)
    toolkit.step(4)
    assert step_in(attempt) == step


def test_the_guard_leaves_the_heartbeat_of_a_training_loop_alone(run_directory):
    attempt = claim_attempt(run_directory)
    write_json(attempt.heartbeat, {"step": 2, "time": "x"})
    attempt.log_file(0).write_text("toolkit: step 3\n")
    lines = StepLines(attempt, attempt.log_file(0))
    lines.start()
    lines.finish()
    assert step_in(attempt) == 2


def test_an_integer_of_numpy_is_a_step_and_a_full_disk_does_not_end_the_script(in_rank, capsys):
    attempt = in_rank("0")
    toolkit.step(np.int64(5))
    assert step_in(attempt) == 5
    attempt.heartbeat.unlink()
    attempt.heartbeat.mkdir()
    step_module.watch_of_rank()._beat_at = float("-inf")
    toolkit.step(6)
    assert "cannot record the step" in capsys.readouterr().err


def test_the_last_step_of_a_program_is_recorded_when_it_exits(run_directory):
    attempt = claim_attempt(run_directory)
    environment = {
        **os.environ, "TOOLKIT_RUN_DIR": str(run_directory.path), "TOOLKIT_ATTEMPT": "0", "TOOLKIT_RANK": "0",
    }  # fmt: skip
    program = "import toolkit\nfor n in range(9): toolkit.step(n)"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert step_in(attempt) == 8


def test_outside_of_a_run_a_step_does_nothing_and_a_wrong_one_is_refused():
    toolkit.step(1)
    for wrong in (-1, "3", 2.5, True):
        with pytest.raises(ToolkitError, match="expected a step number"):
            toolkit.step(wrong)

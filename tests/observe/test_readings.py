"""What a run recorded is read once, while its nodes and ranks go on writing."""

from __future__ import annotations

import json

import pytest
from step_windows import NOW_S, same, window

from toolkit.metrics.verdicts import Severity, VerdictKind, VerdictLog, clear_verdict, raise_verdict
from toolkit.metrics.window_file import WindowFile
from toolkit.metrics.windows import STEP
from toolkit.observe.readings import RunReadings
from toolkit.rundir.claims import claim_attempt
from toolkit.supervise.node_state import NodeState


def line(step: int, attempt: int = 0) -> str:
    record = {
        "step": step, "steps": 9, "loss": 1.0, "loss_hex": "0x1p+0", "lr": 0.1, "grad_norm": 1.0, "samples": 5, "tokens": 5,
        "seconds": 0.1, "tokens_per_s": 1.0, "time": "2026-11-24T00:00:00.000+00:00", "attempt": attempt, "world": 4,
    }  # fmt: skip
    return json.dumps(record) + "\n"


def test_updates_read_what_is_new_of_the_newest_attempt(run_directory):
    first = claim_attempt(run_directory)
    file = WindowFile(first.windows_file(0), "n0")
    file.append([window(rank, 0) for rank in (0, 1)])
    readings = RunReadings(run_directory)
    readings.update()
    readings.update()
    assert {rank: len(windows) for rank, windows in readings.windows.items()} == {0: 1, 1: 1}
    file.append([window(0, 1, **{STEP: same(0.5)})])
    readings.update()
    assert [one.mean(STEP) for one in readings.windows[0]] == pytest.approx([0.2, 0.5])

    second = claim_attempt(run_directory)
    NodeState(second, "n5", launcher=1, first_rank=0).write(None)
    readings.update()
    assert (readings.attempt, readings.windows) == (second.number, {})
    assert [one.host for samples in readings.samples.values() for one in samples] == ["n5"]


def test_a_resumed_attempt_replaces_the_steps_that_it_repeats(run_directory):
    claim_attempt(run_directory)
    log = run_directory.metrics / "train.jsonl"
    log.write_text(line(1) + line(2) + line(3))
    readings = RunReadings(run_directory)
    readings.update()
    with log.open("a") as stream:
        stream.write(line(2, attempt=1) + line(3, attempt=1)[:20])  # the last one is being written
    readings.update()
    assert [(one.step, one.attempt) for one in readings.training] == [(1, 0), (2, 1)]


def test_raised_verdicts_are_those_that_were_not_cleared(run_directory):
    attempt = claim_attempt(run_directory)
    stall = raise_verdict(VerdictKind.STALL, Severity.CRITICAL, "no step", "look", time_s=NOW_S)
    leak = raise_verdict(VerdictKind.MEMORY_LEAK, Severity.WARNING, "grows", "look", time_s=NOW_S)
    with VerdictLog(run_directory.metrics / "verdicts.jsonl") as log:
        for verdict in (stall, leak, clear_verdict(stall, NOW_S + 1)):
            log.write(verdict)
    readings = RunReadings(run_directory)
    readings.update()
    assert (attempt.number, [one.kind for one in readings.raised]) == (0, [VerdictKind.MEMORY_LEAK])
    assert len(readings.verdicts) == 3


def test_a_damaged_file_is_named_once_and_hides_nothing_else(run_directory):
    attempt = claim_attempt(run_directory)
    attempt.windows_file(0).write_bytes(b"something else")
    WindowFile(attempt.windows_file(2), "n1").append([window(2, 0)])
    readings = RunReadings(run_directory)
    readings.update()
    readings.update()
    assert list(readings.windows) == [2]
    assert len(readings.problems) == 1 and "rank-00000.bin" in readings.problems[0]

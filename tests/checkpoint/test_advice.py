"""How often to save: the formulas against brute force, and what is said of runs whose files are known."""

from __future__ import annotations

import json
import math
import random
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.checkpoint.advice import (
    advice_lines,
    daly_interval,
    failure_bounds,
    lost_share,
    measured,
    warning_line,
    young_interval,
)
from toolkit.cli.main import cli
from toolkit.metrics.checkpoints import SaveRecord
from toolkit.rundir.layout import RunDirectory
from toolkit.units import shorten_duration

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


@given(st.floats(0.1, 100), st.floats(2, 5))
@settings(max_examples=30)
def test_the_higher_order_interval_loses_least(cost_s, decades):
    """Against a search over all intervals, for mean times from 100 times the cost on."""
    mtbf_s = cost_s * 10**decades
    intervals = [daly_interval(cost_s, mtbf_s) * 1.02**power for power in range(-300, 300)]
    least = min(lost_share(interval, cost_s, mtbf_s) for interval in intervals)
    assert lost_share(daly_interval(cost_s, mtbf_s), cost_s, mtbf_s) == pytest.approx(least, rel=1e-3)
    assert young_interval(cost_s, mtbf_s) == pytest.approx(daly_interval(cost_s, mtbf_s) + cost_s, rel=0.05)


def test_the_lost_share_is_that_of_a_run_that_fails_by_chance():
    """A run that is played through: work is lost back to the last save, failures come at a constant rate."""
    chance, interval_s, cost_s, mtbf_s = random.Random(0), 100.0, 10.0, 300.0
    done, now, fails_at = 0, 0.0, chance.expovariate(1 / mtbf_s)
    while done < 40_000:
        if now + interval_s + cost_s <= fails_at:
            now, done = now + interval_s + cost_s, done + 1
        else:
            now, fails_at = fails_at, fails_at + chance.expovariate(1 / mtbf_s)
    assert lost_share(interval_s, cost_s, mtbf_s) == pytest.approx(1 - done * interval_s / now, rel=0.02)


def test_where_saves_cost_more_than_failures_come_nothing_overflows():
    assert daly_interval(100, 10) == 10
    assert lost_share(1e6, 1, 1) == 1.0
    assert 0 < lost_share(1, 1e-9, 1e9) < 1e-6


@pytest.mark.parametrize(
    # Garwood's table for a Poisson count: 95 % bounds of what was to be expected.
    ("failures", "least", "most"), [(1, 0.0253, 5.572), (2, 0.2422, 7.225), (10, 4.795, 18.39), (100, 81.36, 121.6)],
)  # fmt: skip
def test_the_bounds_are_the_exact_ones(failures, least, most):
    low, high = failure_bounds(failures, 1.0)
    assert (1 / high, 1 / low) == (pytest.approx(least, rel=2e-3), pytest.approx(most, rel=1e-3))


def test_after_no_failure_three_are_the_most():
    low, high = failure_bounds(0, 3000)
    assert low == pytest.approx(1000, rel=2e-3) and math.isinf(high)


def a_run(folder: Path, *, gap_s: float, cost_s: float, lives: list[tuple[str, float, bool]]) -> Path:
    """A run of attempts (cause, seconds, saved at the stop) with a save after each `gap_s` of work."""
    run = RunDirectory(folder)
    run.metrics.mkdir(parents=True)
    lines, clock = [], BEGAN
    for number, (cause, seconds, saved) in enumerate(lives):
        attempt = run.attempt(number)
        attempt.path.mkdir(parents=True)
        attempt.start_file.write_text(sample("attempt_start", time=clock.isoformat()))
        saves = int(seconds / (gap_s + cost_s))
        for save in range(1, saves + 1):
            ended = clock + timedelta(seconds=save * (gap_s + cost_s))
            why = "stop" if saved and save == saves else "every_s"
            lines.append(record(save, why, cost_s, ended, number))
        clock += timedelta(seconds=seconds)
        if cause != "lives":
            attempt.exit_file.write_text(sample("attempt_exit", cause=cause, seconds=seconds, step=saves or None))
    (run.metrics / "checkpoints.jsonl").write_text("".join(lines))
    return folder


def sample(name: str, **changed: object) -> str:
    path = Path(__file__).parents[2] / "docs" / "samples" / f"{name}.json"
    return json.dumps(json.loads(path.read_text()) | changed)


def record(step: int, why: str, waited_s: float, ended: datetime, attempt: int) -> str:
    return SaveRecord(step, why, waited_s, waited_s, 1, None, None, ended.isoformat(), attempt).to_line() + "\n"


def test_failures_are_counted_apart_from_what_was_foreseen(tmp_path):
    lives = [
        ("crashed", 7000.0, False), ("crashed", 5.0, False), ("walltime", 7000.0, True), ("preempted", 7000.0, True),
        ("preempted", 7000.0, False), ("node_lost", 7000.0, False), ("lives", 7000.0, False),
    ]  # fmt: skip
    costs = measured(a_run(tmp_path / "run", gap_s=590, cost_s=10, lives=lives))
    # The second crash came before a step was taken, so that none was lost.
    assert costs.failures == {"crashed": 1, "preempted without a save": 1, "lost a node": 1}
    assert costs.foreseen == 2
    assert (costs.cost_s, costs.interval_s) == (10, pytest.approx(590))
    assert costs.seconds == pytest.approx(5 * 7000 + 5 + 11 * 600)  # an attempt that lives counts to its last save


def test_a_save_in_the_background_costs_what_was_waited_for(tmp_path):
    """Saves begin every 10 s, stop the steps for 1 s, and are written 5 s later."""
    run = a_run(tmp_path / "run", gap_s=9, cost_s=1, lives=[("completed", 100, True)])
    (tmp_path / "run" / "metrics" / "checkpoints.jsonl").write_text(
        "".join(
            SaveRecord(step, "every_s", 1.0, 6.0, 1, None, None, f"2026-01-01T00:00:{10 * step + 6}+00:00", 0).to_line()
            + "\n"
            for step in range(1, 5)
        )
    )
    costs = measured(run)
    assert (costs.cost_s, costs.interval_s) == (1.0, 9.0)


def test_a_good_interval_is_told_and_no_change_asked_for(tmp_path):
    run = a_run(tmp_path / "run", gap_s=590, cost_s=10, lives=[("crashed", 36_000.0, False)] * 2)
    assert advice_lines(run) == [
        "saves: 120 at 10 s each, one per 9.8 min of work (medians)",
        "failures: 2 in 20 h (crashed: 2): one per 10 h (95 % interval: 2.8 h to 3.4 d)",
        "the best interval is 14 min of work (Daly 2006; Young 1974: 14 min), "
        "which loses 2.3 % of the time (now 2.5 %)",
    ]
    assert warning_line(run) == ""


def test_saves_that_are_far_too_many_are_said(tmp_path):
    run = a_run(tmp_path / "run", gap_s=20, cost_s=10, lives=[("crashed", 36_000.0, False)] * 2)
    assert warning_line(run) == advice_lines(run)[-1]
    assert warning_line(run).startswith("save less often: about 33 % of the time is lost to saves and repeated steps")
    assert warning_line(run).endswith("2.3 % with checkpoint.every_s = 842 and every_steps = 0")


def test_saves_that_are_far_too_few_are_said(tmp_path):
    run = a_run(tmp_path / "run", gap_s=1990, cost_s=10, lives=[("crashed", 4_100.0, False)] * 12)
    assert warning_line(run).startswith("save more often")


def test_without_a_failure_nobody_is_told_to_save_more_often(tmp_path):
    rare = a_run(tmp_path / "rare", gap_s=9990, cost_s=10, lives=[("completed", 36_000.0, False)])
    assert advice_lines(rare)[1:] == [
        "failures: none in 10 h, so at most one per 3.3 h (95 %, rule of three)",
        "no need to save more often than every 8.1 min of work (Daly 2006; Young 1974: 8.2 min); saves now take 0.1 %",
    ]
    often = a_run(tmp_path / "often", gap_s=20, cost_s=10, lives=[("completed", 36_000.0, False)])
    assert warning_line(often).startswith("save less often")


def test_a_run_without_saves_gets_no_advice_and_a_damaged_file_is_named(tmp_path):
    run = a_run(tmp_path / "run", gap_s=590, cost_s=10, lives=[("crashed", 100.0, False)])
    assert advice_lines(run) == [] and warning_line(run) == ""
    assert advice_lines(tmp_path / "none") == []
    (run / "metrics" / "checkpoints.jsonl").write_text("x\n")
    (line,) = advice_lines(run)
    assert line == warning_line(run) and "is unknown" in line and "checkpoints.jsonl:1: not a save record" in line


ODD = [None, True, -1, 0, 1e308, 10**30, 10**400, "x", "", [], {}, "0001-01-01T00:00:00", "9999-12-31T23:59:59-12:00"]


@given(st.sampled_from(["save", "attempt_start", "attempt_exit"]), st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_files_of_a_run_are_said_and_raise_nothing(tmp_path_factory, name, data):
    run = a_run(tmp_path_factory.mktemp("odd") / "run", gap_s=59, cost_s=1, lives=[("lives", 300.0, False)])
    keys = [field.name for field in fields(SaveRecord)] if name == "save" else ["time", "seconds", "step", "cause"]
    odd = {data.draw(st.sampled_from(keys)): data.draw(st.sampled_from(ODD))}
    if name == "save":
        path = run / "metrics" / "checkpoints.jsonl"
        path.write_text("".join(json.dumps(json.loads(line) | odd) + "\n" for line in path.read_text().splitlines()))
    else:
        file = {"attempt_start": "start.json", "attempt_exit": "exit.json"}[name]
        (run / "attempts" / "000" / file).write_text(sample(name, **odd))
    lines = advice_lines(run)
    assert all("\n" not in line for line in lines) and warning_line(run) in ["", *lines]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.12, "0.12 s"), (12, "12 s"), (89, "89 s"), (150, "2.5 min"), (9000, "2.5 h"), (400_000, "4.6 d"), (36_000, "10 h")],
)  # fmt: skip
def test_times_are_said_in_their_unit(seconds, said):
    assert shorten_duration(seconds) == said


def test_the_list_of_checkpoints_says_what_saves_cost(tmp_path):
    run = a_run(tmp_path / "run", gap_s=590, cost_s=10, lives=[("crashed", 36_000.0, False)] * 2)
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    done = CliRunner().invoke(cli, ["ckpt", "ls", str(run)])
    assert done.exit_code == 0 and "STEP" in done.stdout
    assert done.stderr.splitlines() == advice_lines(run)

"""`own.jsonl`: what is written of a program's own metrics, and what readers make of repeated steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jsonschema
import pytest
from step_windows import window

from toolkit.errors import ToolkitError
from toolkit.metrics.own import MOST_POINTS, MeanLog, OwnLog, OwnRecord, OwnTail, last_own, read_own
from toolkit.metrics.records import RecordLog
from toolkit.metrics.ring import ABSENT, WIDTH, Ring, RingReader
from toolkit.metrics.run_metrics import in_words, losses_of, newest_metrics, with_own

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/run-directory.schema.json").read_text())


@pytest.fixture
def rank(tmp_path):
    """Rank 0: `rank(log, step, loss=2.0)` appends a step, and `log` gets what is new."""
    ring = Ring(tmp_path / "0.ring", "run", 0, 0)
    reader = RingReader(ring.path)

    def append(log: OwnLog, *steps: int, flush: bool = True, **values: float) -> None:
        for step in steps:
            row = [ABSENT] * WIDTH
            for name, value in values.items():
                row[ring.column(name)] = value
            ring.append(1000.0 + step, step, row)
        log.add(reader.new())
        if flush:
            log.flush()

    yield append
    ring.close()


def series(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = {name: [(one.step, one.value) for one in points] for name, points in read_own(folder).items()}
    tail = OwnTail(folder)
    tail.update()
    followed = {name: [(one.step, one.value) for one in points] for name, points in tail.points.items() if points}
    assert str(followed) == str(found)
    return found


def test_a_line_has_the_newest_value_of_each_metric_and_its_step(tmp_path, rank):
    log = OwnLog(tmp_path, 3)
    rank(log, 1, flush=False, loss=3.0, val_acc=0.1)
    rank(log, 2, flush=False, loss=2.31, step_s=0.5, data_s=0.1, switches=3.0)
    log.flush()
    log.flush()
    rank(log, 3, lr=3e-4)
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    for line in lines:
        jsonschema.validate(line, {**SCHEMA, "$ref": "#/$defs/own"})
    assert lines == [
        {
            "first": 1, "step": 2, "time": "1970-01-01T00:16:42.000Z", "attempt": 3,
            "values": {"loss": 2.31, "val_acc": 0.1}, "at": {"val_acc": 1},
        },
        {
            "first": 3, "step": 3, "time": "1970-01-01T00:16:43.000Z", "attempt": 3,
            "values": {"loss": 2.31, "val_acc": 0.1, "lr": 0.0003}, "at": {"loss": 2, "val_acc": 1},
        },
    ]  # fmt: skip
    assert series(tmp_path) == {"loss": [(2, 2.31)], "val_acc": [(1, 0.1)], "lr": [(3, 0.0003)]}
    assert last_own(tmp_path) == OwnRecord.from_line(json.dumps(lines[-1]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_kept(tmp_path, rank, value):
    log = OwnLog(tmp_path, 0)
    rank(log, 1, loss=value)
    log.close()
    (line,) = (tmp_path / "own.jsonl").read_text().splitlines()
    jsonschema.validate(json.loads(line, parse_constant=pytest.fail), {**SCHEMA, "$ref": "#/$defs/own"})
    assert str(series(tmp_path)) == str({"loss": [(1, value)]})
    assert in_words(newest_metrics(tmp_path).values) == f"loss {value}"


def test_a_resumed_attempt_replaces_the_steps_that_it_repeats(tmp_path, rank):
    for attempt, steps in enumerate(((1, 2, 3, 4), (3, 5))):
        log = OwnLog(tmp_path, attempt)
        for step in steps:
            also = {"val_acc": step / 10} if step in (1, 4) else {}
            rank(log, step, loss=10.0 * attempt + step, **also)
        log.close()
    assert series(tmp_path) == {"loss": [(1, 1.0), (2, 2.0), (3, 13.0), (5, 15.0)], "val_acc": [(1, 0.1)]}
    last = last_own(tmp_path)
    assert (last.step, last.attempt, last.values, last.at) == (5, 1, {"loss": 15.0, "val_acc": 0.1}, {"val_acc": 1})
    assert [(row["step"], row["attempt"]) for row in with_own(tmp_path, [])] == [(1, 0), (2, 0), (3, 1), (5, 1)]


def test_a_value_recorded_after_the_last_step_belongs_to_it(tmp_path, rank):
    log = OwnLog(tmp_path, 0)
    rank(log, 7, loss=1.5)
    rank(log, 7, test_acc=0.75)
    log.close()
    assert series(tmp_path) == {"loss": [(7, 1.5)], "test_acc": [(7, 0.75)]}


def test_with_the_training_log_only_other_metrics_count(tmp_path, rank):
    (tmp_path / "train.jsonl").touch()
    log = OwnLog(tmp_path, 0)
    rank(log, 1, loss=1.5)
    assert not (tmp_path / "own.jsonl").exists()
    rank(log, 2, loss=1.5, reward=4.0)
    log.close()
    assert series(tmp_path) == {"reward": [(2, 4.0)]}
    lines = [{"step": 1, "loss": 1.5, "attempt": 0, "lr": 0.1}, {"step": 2, "loss": 1.4, "attempt": 0, "lr": 0.1}]
    assert with_own(tmp_path, lines) == [lines[0], {**lines[1], "reward": 4.0}]
    log = OwnLog(tmp_path, 0)
    rank(log, 3, lr=9.0)
    log.close()
    assert with_own(tmp_path, lines)[-1] == {"step": 3, "time": "1970-01-01T00:16:43.000Z", "attempt": 0, "own.lr": 9.0}


def test_means_are_those_of_all_ranks_and_rank_0_does_not_write_them(tmp_path, rank):
    own = OwnLog(tmp_path, 0, ["acc"])
    rank(own, 100, acc=0.0, loss=2.0)
    own.close()
    means = MeanLog(tmp_path, 0, {"acc": True, "other": False})
    means.add_windows([window(0, 0, acc=0.0), window(1, 0, acc=1.0, other=1.0)])
    assert series(tmp_path)["acc"] == [(50, 0.5)]
    means.add_windows([window(2, 0)])
    means.add_windows([window(1, 1, acc=2.0), window(0, 1, acc=1.0), window(2, 0, acc=6.0)])
    means.close()
    assert series(tmp_path) == {"loss": [(100, 2.0)], "acc": [(50, 2.3333333), (100, 3.0)]}
    assert last_own(tmp_path).values == {"loss": 2.0, "acc": 3.0}


def test_the_curve_of_a_mean_loss_is_that_of_all_ranks(tmp_path, rank):
    own = OwnLog(tmp_path, 0, ["loss"])
    rank(own, 100, loss=9.0, acc=1.0)
    own.close()
    means = MeanLog(tmp_path, 0, {"loss": True})
    means.add_windows([window(0, 0, loss=1.0), window(1, 0, loss=2.0), window(0, 1, loss=0.5)])
    means.close()
    assert losses_of(tmp_path, 9) == [1.5, 1.25]


def test_a_late_window_does_not_move_the_means_back(tmp_path):
    means = MeanLog(tmp_path, 0, {"acc": True, "late": True})
    means.add_windows([window(0, 1, acc=1.0)])
    means.add_windows([window(0, 2, acc=3.0)])
    means.add_windows([window(1, 1, acc=5.0, late=2.0)])
    means.add_windows([window(1, 2, steps=49, acc=7.0)])  # step 147, while rank 0 is at 150
    means.add_windows([window(0, 3, acc=5.0)])
    means.close()
    assert series(tmp_path) == {"acc": [(100, 1.0), (150, 5.0), (200, 6.0)], "late": [(150, 2.0)]}


def test_a_page_that_follows_a_long_run_keeps_some_points_of_all_its_steps(tmp_path):
    tail = OwnTail(tmp_path)
    with RecordLog(tmp_path / "own.jsonl") as log:
        for begin in range(1, 40_000, 4_000):
            for step in range(begin, begin + 4_000):
                log.write(
                    OwnRecord(
                        step, step, "2026-11-28T00:00:00.000Z", 0, {"loss": float(step), "once": 1.0}, {"once": 1}
                    )
                )
            tail.update()
    steps = [one.step for one in tail.points["loss"]]
    assert MOST_POINTS / 4 < len(steps) <= MOST_POINTS and steps[-1] == 40_000 and steps == sorted(steps)
    tenths = [sum(begin < step <= begin + 4_000 for step in steps) for begin in range(0, 40_000, 4_000)]
    assert min(tenths[:8]) > max(tenths[:8]) / 2 > 50
    assert [one.step for one in tail.points["once"]] == [1]


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"first": 1}\n')
    with pytest.raises(ToolkitError, match="not a metric record") as error:
        read_own(tmp_path)
    assert error.value.where.endswith("own.jsonl:1")
    assert last_own(tmp_path) is None


def test_a_resumed_attempt_reads_the_file_back_to_the_step_at_which_it_continues(tmp_path, rank, monkeypatch):
    log = OwnLog(tmp_path, 0)
    rank(log, 1, loss=1.0, val_acc=0.25)
    for step in range(2, 2000):
        rank(log, step, loss=float(step))
    log.close()
    log = OwnLog(tmp_path, 1)  # repeats 1000 steps, and has another metric since step 1200
    rank(log, *range(1000, 1500), flush=False, loss=0.25)
    log.flush()
    rank(log, 1500, loss=0.125, lr=0.75)
    log.close()
    read, from_line = [], OwnRecord.from_line
    monkeypatch.setattr(OwnRecord, "from_line", lambda line: read.append(line) or from_line(line))
    log = OwnLog(tmp_path, 2)
    rank(log, 1200, other=2.0)
    log.close()
    # The values of step 1199 of the first attempt are replaced, and those of the second one were not written.
    assert from_line((tmp_path / "own.jsonl").read_text().splitlines()[-1]) == OwnRecord(
        1200, 1200, "1970-01-01T00:36:40.000Z", 2, {"loss": 999.0, "val_acc": 0.25, "other": 2.0},
        {"loss": 999, "val_acc": 1},
    )  # fmt: skip
    assert len(read) < 1100

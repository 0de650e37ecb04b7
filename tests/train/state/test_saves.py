"""When a run saves and why, what the metric makes of it, and what a save that fails leads to."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from launch import job, launch, said_by

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.retention import Retention
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.layout import committed_steps
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.config.checkpoint import CheckpointTable
from toolkit.errors import ToolkitError
from toolkit.metrics.checkpoints import SaveRecord, read_save_log
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.layout import RunDirectory, create_run
from toolkit.train.schedule import Schedule
from toolkit.train.state import TrainingState
from toolkit.train.state import saves as saves_module
from toolkit.train.state.saves import Saves
from toolkit.world.facts import World
from toolkit.world.health import HealthWatch
from toolkit.world.stop import SAVE, StopWatch

DOCS = Path(__file__).parents[3] / "docs"


class Run:
    """A run of one rank whose steps are taken by hand; `loss` is each step's."""

    def __init__(self, run_dir: Path, attempt: int = 0, measures=None, **settings) -> None:
        self.world = World(
            0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt, run_dir, StopWatch(RunDirectory(run_dir))
        )
        table = CheckpointTable(**({"every_steps": 0, "keep_last": 100} | settings))
        model = torch.nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.state = TrainingState(model, optimizer, Schedule(0.1, 1000, 0), 0)
        self.checkpointer = Checkpointer(run_dir / "checkpoints", self.world, retention=Retention.of(table))
        self.state.resume(self.checkpointer, self.world)
        self.saves = Saves(self.world, self.state, self.checkpointer, table, measures)

    def step(self, loss: float = 1.0, *, stop: bool = False, last: bool = False, others: int = 0) -> bool:
        """`others` is what other ranks ask for."""
        asked = self.saves.asked() + others
        self.state.step += 1
        self.world.stop_agreed(asked)
        return self.saves.after_step(torch.tensor(loss), stop=stop, last=last)


def saved(run_dir: Path) -> list[tuple[int, str]]:
    return [(record.step, record.why) for record in records(run_dir)]


def records(run_dir: Path) -> list[SaveRecord]:
    return read_save_log(run_dir / "metrics" / "checkpoints.jsonl")


@pytest.fixture
def clock(monkeypatch):
    # Before the real clock, by which the checkpointer notes the end of a save: a host may be up for minutes only.
    now = [time.monotonic() - 1e6]
    monkeypatch.setattr(saves_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_any_save_starts_the_clock_anew(tmp_path, clock):
    run = Run(tmp_path, every_s=60, every_steps=4)
    for _ in range(12):
        clock[0] += 25
        run.step()
    # Step 3 after 75 s, step 4 by its number, and then 60 s are over again with step 7.
    assert saved(tmp_path) == [
        (3, "every_s"), (4, "every_steps"), (7, "every_s"), (8, "every_steps"), (11, "every_s"), (12, "every_steps"),
    ]  # fmt: skip


def test_a_file_asks_and_other_ranks_ask_for_their_health(tmp_path, clock):
    run = Run(tmp_path)
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "save").touch()
    for others in (0, 0, 3 * SAVE, 0):
        run.step(others=others)
    assert saved(tmp_path) == [(1, "asked"), (3, "health")]


def test_a_new_best_is_saved_and_nothing_that_is_no_number(tmp_path):
    losses = [5.0, 3.0, 4.0, 4.0, math.nan, 1.0, 2.0, 2.0, 1.0, 1.0, 9.0]
    run = Run(tmp_path, best="loss", best_every_steps=2, keep_best=1, keep_last=1)
    for number, loss in enumerate(losses):
        run.step(loss, last=number == len(losses) - 1)
    # Means of two steps: 4, 4, nan, 2, 1; the last step is looked at by itself.
    assert [(record.step, record.why, record.metric) for record in records(tmp_path)] == [
        (2, "best", 4.0), (8, "best", 2.0), (10, "best", 1.0), (11, "end", 9.0),
    ]  # fmt: skip
    assert list(committed_steps(tmp_path / "checkpoints")) == [10, 11]
    best = read_manifest(tmp_path / "checkpoints" / "step-00000010").state["metric"]
    last = read_manifest(tmp_path / "checkpoints" / "step-00000011").state["metric"]
    assert best == {"name": "loss", "value": 1.0, "best": 1.0}
    assert last == {"name": "loss", "value": 9.0, "best": 1.0}


def test_the_best_so_far_outlives_a_resume(tmp_path):
    values = iter([0.5, 0.7, 0.6, 0.8])
    measures = {"accuracy": lambda: next(values)}
    given = {"best": "accuracy", "best_mode": "max", "best_every_steps": 1, "every_steps": 3}
    run = Run(tmp_path, measures=measures, **given)
    for _ in range(2):
        run.step()
    run = Run(tmp_path, attempt=1, measures=measures, **given)
    assert run.state.step == 2
    for _ in range(2):
        run.step()
    assert saved(tmp_path) == [(1, "best"), (2, "best"), (3, "every_steps"), (4, "best")]


def test_a_save_for_another_reason_makes_no_best(tmp_path):
    run = Run(tmp_path, best="loss", best_every_steps=1, every_steps=3)
    for loss in (math.nan, 1.0, 3.0, 2.0, 0.5):
        run.step(loss)
    assert saved(tmp_path) == [(2, "best"), (3, "every_steps"), (5, "best")]


def test_a_step_that_is_due_is_named_before_the_clock(tmp_path, clock):
    run = Run(tmp_path, every_s=60, every_steps=2)
    for _ in range(2):
        clock[0] += 40
        run.step()
    assert saved(tmp_path) == [(2, "every_steps")]


def test_a_metric_of_another_step_is_not_this_ones(tmp_path):
    run = Run(tmp_path, best="loss", best_every_steps=2, every_steps=3)
    for loss in (1.0, 1.0, 7.0):
        run.step(loss)
    metric = read_manifest(tmp_path / "checkpoints" / "step-00000003").state["metric"]
    assert metric == {"name": "loss", "best": 1.0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"best": "los"},
            r"checkpoint\.best: this job does not measure 'los', only loss, accuracy\. Fix: set checkpoint\.best to 'loss'",
        ),
        (
            {"best": "f1"},
            r"this job does not measure 'f1', only loss, accuracy\. Fix: set checkpoint\.best to 'loss' or 'accuracy'",
        ),
        ({"keep_best": 2}, r"checkpoint\.keep_best: keep_best = 2 requires a metric in checkpoint\.best, got none"),
    ],
)
def test_a_metric_that_nobody_measures_is_refused(tmp_path, settings, said):
    run = Run(tmp_path)
    table = SimpleNamespace(**CheckpointTable().model_dump() | settings)  # a loop's own, which no job file was read for
    with pytest.raises(ToolkitError, match=said):
        Saves(run.world, run.state, run.checkpointer, table, {"accuracy": lambda: 0.5})


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    with (folder / "filling").open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space"):
        while True:
            stream.write(bytes(4096))
    return folder / "filling"


def test_a_run_that_goes_on_over_a_full_disk_saves_when_there_is_room(small_disk, capsys):
    run = Run(small_disk, every_steps=2, on_error="continue")
    for _ in range(2):
        run.step()
    filling = fill(small_disk)
    for _ in range(4):
        run.step()
    filling.unlink()
    for _ in range(2):
        run.step()
    good = [record.step for record in records(small_disk) if record.error is None]
    assert good == [2, 8] == list(committed_steps(small_disk / "checkpoints"))
    assert all(verify_fully(folder)[1] == [] for folder in committed_steps(small_disk / "checkpoints").values())
    said = capsys.readouterr().err
    assert said.count("the run continues without this checkpoint") == 2
    assert said.count("No space left on device") == said.count("step 2 is the last good checkpoint") == 2
    fill(small_disk)
    with pytest.raises(ToolkitError, match="No space left"):
        run.step(last=True)


def test_a_failed_save_is_written_down_and_ends_the_run_by_default(tmp_path):
    run = Run(tmp_path, every_steps=1)
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(ToolkitError, match="was not saved"):
        run.step()
    (record,) = records(tmp_path)
    assert "was not saved" in record.error and record.committed_s is None and record.bytes is None


def test_a_best_that_could_not_be_saved_may_come_again(tmp_path):
    run = Run(tmp_path, best="loss", best_every_steps=1, on_error="continue")
    (tmp_path / "checkpoints").write_text("in the way")
    run.step(1.0)
    (tmp_path / "checkpoints").unlink()
    run.step(2.0)
    assert [(record.why, record.error is None) for record in records(tmp_path)] == [("best", False), ("best", True)]


def train_on_a_failing_node(world, config) -> None:
    """The memory of rank 1's node runs out before the first step; rank 1 is the one that looks at it."""
    from toolkit.jobs import train_lm

    root = world.run_dir / f"root-{world.rank}"
    (root / "proc").mkdir(parents=True)
    free = 1000 if world.rank == 0 else 10
    (root / "proc" / "meminfo").write_text(f"MemTotal: 1000 kB\nMemAvailable: {free} kB\n")
    saves_module._health_watch = lambda world: HealthWatch(root=root)
    train_lm.main(world, config)


def test_failing_health_of_one_rank_saves_on_all(tmp_path):
    config = job(steps=6)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": 0})})
    launch(train_on_a_failing_node, 2, tmp_path, config)
    assert saved(tmp_path) == [(1, "health"), (6, "end")]
    assert "rank 1 on" in said_by(tmp_path, 1) and "requests a save: the node has" in said_by(tmp_path, 1)


def train(world, config) -> None:
    from toolkit.jobs import train_lm

    train_lm.main(world, config)


def test_a_run_of_two_ranks_keeps_its_best_and_its_clock(tmp_path):
    """All ranks agree on each save, whichever of them asked for it."""
    config = job(steps=40, batch=4)
    given = {"every_steps": 0, "best": "loss", "best_every_steps": 10, "keep_last": 1, "keep_best": 1, "every_s": 1}
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=given)})
    launch(train, 2, tmp_path, config)
    metrics = {record.step: record.metric for record in records(tmp_path) if record.metric is not None}
    assert 10 in metrics and 40 in metrics
    assert set(committed_steps(tmp_path / "checkpoints")) == {40, min(metrics, key=metrics.get)}
    schema = json.loads((DOCS / "schemas" / "run-directory.schema.json").read_text())
    for line in (tmp_path / "metrics" / "checkpoints.jsonl").read_text().splitlines():
        jsonschema.validate(json.loads(line), {**schema, "$ref": "#/$defs/save"})


def test_a_run_that_saved_far_too_often_says_so_when_it_ends(tmp_path, capsys):
    run_dir = create_run(tmp_path, "job").path
    attempt = claim_attempt(RunDirectory(run_dir))
    sample = json.loads((DOCS / "samples" / "attempt_start.json").read_text())
    attempt.start_file.write_text(json.dumps(sample | {"time": "2026-01-01T00:00:00.000Z"}))
    run = Run(run_dir, every_steps=1)
    for _ in range(5):
        run.step()
    assert capsys.readouterr().err == ""
    run.step(last=True)
    assert capsys.readouterr().err.startswith("toolkit: save less often: about ")
    assert [why for _, why in saved(run_dir)] == ["every_steps"] * 5 + ["end"]


def test_a_run_that_ends_keeps_no_checkpoint_for_its_begin(tmp_path):
    first = Run(tmp_path, keep_last=1, every_steps=1)
    first.step()
    first.step(last=True)
    second = Run(tmp_path, attempt=1, keep_last=1, every_steps=1)
    second.step()
    assert list(committed_steps(tmp_path / "checkpoints")) == [2, 3]  # it may have to begin again from step 2
    second.step(last=True)
    assert list(committed_steps(tmp_path / "checkpoints")) == [4]

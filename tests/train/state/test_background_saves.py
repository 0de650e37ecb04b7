"""Saves that are written while training goes on: what they hold, when they fail, and how a run ends over one."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import job, launch, said_by
from test_saves import Run, records, saved

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.layout import committed_steps
from toolkit.checkpoint.saving.prepared import PreparedSave
from toolkit.config.checkpoint import CheckpointTable
from toolkit.errors import ToolkitError
from toolkit.metrics.training import read_train_log
from toolkit.train.schedule import Schedule
from toolkit.train.state import TrainingState
from toolkit.train.state.saves import Saves
from toolkit.world.facts import World

WRITE = PreparedSave._write_own


@pytest.fixture
def gate(monkeypatch):
    """Saves in the background are not written before it is set."""
    opened = threading.Event()

    def wait_and_write(self, *given):
        if threading.current_thread().name == "checkpoint save":
            assert opened.wait(30)
        return WRITE(self, *given)

    monkeypatch.setattr(PreparedSave, "_write_own", wait_and_write)
    yield opened
    opened.set()


def in_background(**settings) -> dict:
    return {"background": True, **settings}


def config_of(ranks_see: dict, **train):
    config = job(**train)
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=ranks_see)})


def until_idle(run: Run) -> None:
    while run.checkpointer.is_any_busy():
        time.sleep(0.01)


def train(world, config) -> None:
    from toolkit.jobs import train_lm

    train_lm.main(world, config)


def losses(run_dir: Path) -> dict[int, str]:
    return {record.step: record.loss_hex for record in read_train_log(run_dir / "metrics" / "train.jsonl")}


def assert_all_whole(run_dir: Path) -> None:
    assert all(verify_fully(folder)[1] == [] for folder in committed_steps(run_dir / "checkpoints").values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_of_a_run_that_waits(tmp_path, ranks):
    for name, background in (("waits", False), ("goes on", True)):
        given = {"background": background, "every_steps": 3}
        launch(train, ranks, tmp_path / name, config_of(given, steps=20))
    assert losses(tmp_path / "waits") == losses(tmp_path / "goes on")
    assert len(losses(tmp_path / "waits")) == 20
    assert [step for step, _ in saved(tmp_path / "goes on")] == [3, 6, 9, 12, 15, 18, 20]
    assert_all_whole(tmp_path / "goes on")
    for record in records(tmp_path / "goes on"):
        assert 0 < record.waited_s <= record.committed_s


def killed_in_the_second_save(world, config) -> None:
    begun = []

    def write_and_die(self, *given):
        written = WRITE(self, *given)
        if threading.current_thread().name == "checkpoint save":
            begun.append(self)
            if len(begun) == 2 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return written

    PreparedSave._write_own = write_and_die
    train(world, config)


def test_a_rank_killed_in_a_save_loses_that_save_alone(tmp_path):
    config = config_of(in_background(every_steps=6), steps=20)
    launch(train, 2, tmp_path / "whole", config)
    with pytest.raises(AssertionError, match="exit codes of the ranks"):
        launch(killed_in_the_second_save, 2, tmp_path / "cut", config)
    assert list(committed_steps(tmp_path / "cut" / "checkpoints")) == [6]
    launch(train, 2, tmp_path / "cut", config, attempt=1)
    assert "resumed at step 6" in said_by(tmp_path / "cut", 0, attempt=1)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert_all_whole(tmp_path / "cut")


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    base = torch.randn(6, 8)
    return {
        "plain": base.clone(), "parameter": torch.nn.Parameter(base.clone()), "turned": base.clone().t(),
        "every second": torch.arange(20)[::2], "half": base.bfloat16(), "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4), "complex": torch.randn(5, dtype=torch.complex64).conj(),
        "negative": torch.randn(5, dtype=torch.complex64).conj().imag, "truth": base > 0,
        "expanded": torch.randn(1, 4).expand(3, 4),
    }  # fmt: skip


@torch.no_grad()
def test_what_is_saved_is_the_state_at_the_call(tmp_path, gate):
    world = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")
    checkpointer = Checkpointer(tmp_path, world)
    for step in (1, 2):  # the second copies into the memory of the first
        tensors = tensors_of_all_kinds()
        wanted = {name: tensor.clone() for name, tensor in tensors.items()}
        state, plain = {"history": [1, {"deep": [2]}]}, [1, 2]
        assert checkpointer.save_in_background(step, {"here": tensors, "plain": {"values": plain}}, state)
        for name, tensor in tensors.items():
            if name == "expanded":
                tensor = tensor[:1]
            tensor.copy_(tensor.logical_not() if tensor.dtype == torch.bool else tensor * 2 + 1)
        state["history"][1]["deep"].append(3)
        plain.append(3)
        gate.set()
        checkpointer.wait()
        gate.clear()
        found = {name: torch.zeros_like(tensor.contiguous()) for name, tensor in wanted.items()}
        values = {"values": [0, 0]}
        loaded = checkpointer.load({"here": found, "plain": values})
        assert loaded.step == step and loaded.state == {"history": [1, {"deep": [2]}]}
        assert values == {"values": [1, 2]}
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name


def test_a_busy_save_is_waited_for_or_skipped(tmp_path, gate):
    run = Run(tmp_path, **in_background(every_steps=2, when_busy="skip"))
    for _ in range(5):
        run.step()
    gate.set()
    until_idle(run)
    for _ in range(2):
        run.step()
    assert saved(tmp_path) == [(2, "every_steps")]  # that of step 6 may go on, and 4 was left out
    run.step(last=True)
    assert saved(tmp_path) == [(2, "every_steps"), (6, "every_steps"), (8, "end")]
    assert list(committed_steps(tmp_path / "checkpoints")) == [2, 6, 8]


def test_a_request_that_was_skipped_comes_again(tmp_path, gate):
    run = Run(tmp_path, **in_background(every_steps=2, when_busy="skip"))
    for _ in range(2):
        run.step()
    run.world.stop_watch.ask_save("asked")
    for _ in range(3):
        run.step()
    gate.set()
    until_idle(run)
    run.step(stop=True)
    assert saved(tmp_path) == [(2, "every_steps"), (6, "stop")]
    run = Run(tmp_path, attempt=1, **in_background(when_busy="skip"))
    gate.clear()
    for why in ("asked", "health"):
        run.world.stop_watch.ask_save(why)
        run.step()
    run.step()
    gate.set()
    until_idle(run)
    run.step()
    run.checkpointer.wait()
    run.step()
    assert saved(tmp_path)[2:] == [(7, "asked"), (10, "health")]


def test_what_it_cost_is_what_was_waited_for(tmp_path, gate):
    run = Run(tmp_path, **in_background(every_steps=2))
    for _ in range(3):
        run.step()
    assert saved(tmp_path) == []
    time.sleep(0.5)
    gate.set()
    until_idle(run)
    run.step()
    (record,) = records(tmp_path)
    assert record.step == 2 and record.waited_s < 0.4 < 0.5 < record.committed_s and record.bytes > 0


def test_a_stop_waits_for_the_save_under_way_and_saves_the_newest_state(tmp_path, gate):
    run = Run(tmp_path, **in_background(every_steps=2))
    for _ in range(2):
        run.step()
    threading.Timer(0.3, gate.set).start()
    run.step(stop=True)
    assert saved(tmp_path) == [(2, "every_steps"), (3, "stop")]
    assert list(committed_steps(tmp_path / "checkpoints")) == [2, 3]


def test_a_save_of_the_same_step_is_waited_for_and_not_written_twice(tmp_path, gate):
    run = Run(tmp_path)
    run.state.save_in_background(run.checkpointer, run.world)
    threading.Timer(0.3, gate.set).start()
    folder = run.state.save(run.checkpointer, run.world)
    written_at = (folder / "manifest.json").stat().st_mtime_ns
    run.state.save_in_background(run.checkpointer, run.world)
    run.state.save(run.checkpointer, run.world)
    assert (folder / "manifest.json").stat().st_mtime_ns == written_at


def test_a_best_that_failed_in_the_background_may_come_again(tmp_path):
    run = Run(tmp_path, **in_background(best="loss", best_every_steps=1, on_error="continue"))
    run.step(1.0)
    run.checkpointer.wait()
    resource_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource_limit[1]))
    try:
        run.step(0.5)
        until_idle(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, resource_limit)
    run.step(0.75)
    until_idle(run)
    run.step(2.0)
    found = [(record.step, record.why, record.metric, record.error is None) for record in records(tmp_path)]
    assert found == [(1, "best", 1.0, True), (2, "best", 0.5, False), (3, "best", 0.75, True)]


def step_on_a_failing_disk(world: World, on_error: str, when_busy: str) -> None:
    """Rank 1 cannot write from the second save on; from step 10 on it can again."""
    model = torch.nn.Linear(100, 100)
    table = CheckpointTable(every_steps=4, background=True, on_error=on_error, when_busy=when_busy)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), Schedule(0.1, 100, 0), 0)
    state.modules = {f"of-{world.rank}": torch.nn.Linear(300, 100)}  # each rank has something to write
    checkpointer = Checkpointer(world.run_dir / "checkpoints", world)
    saves = Saves(world, state, checkpointer, table)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for _ in range(16):
        if world.rank == 1 and state.step in (5, 10):
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, most[1]) if state.step == 5 else most)
        asked = torch.tensor([saves.asked()])
        dist.all_reduce(asked)
        state.step += 1
        world.stop_agreed(int(asked))
        try:
            saves.after_step(torch.tensor(1.0), stop=False, last=state.step == 16)
        except ToolkitError as error:
            print(f"ended at step {state.step}: {error}", file=sys.stderr)
            return
        while checkpointer._background.is_busy:  # a step takes longer than this small save
            time.sleep(0.01)
    print(f"finished: {list(committed_steps(world.run_dir / 'checkpoints'))}", file=sys.stderr)


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_a_failure_ends_all_ranks_at_the_next_step_with_one_line(tmp_path, when_busy):
    launch(step_on_a_failing_disk, 2, tmp_path, "end", when_busy)
    said = {said_by(tmp_path, rank) for rank in range(2)}
    assert len(said) == 1
    (line,) = said
    assert line.count("\n") == 1 and line.startswith("ended at step 9: ")
    assert "checkpoint of step 8 was not saved: rank 1: File too large" in line
    assert "step 4 is the last good checkpoint" in line
    assert [(record.step, record.error is None) for record in records(tmp_path)] == [(4, True), (8, False)]


def test_a_run_goes_on_over_a_failure_and_saves_when_the_next_is_due(tmp_path):
    launch(step_on_a_failing_disk, 2, tmp_path, "continue", "wait")
    assert [(record.step, record.why, record.error is None) for record in records(tmp_path)] == [
        (4, "every_steps", True), (8, "every_steps", False), (12, "every_steps", True), (16, "end", True),
    ]  # fmt: skip
    assert "finished: [4, 12, 16]" in said_by(tmp_path, 1)
    assert said_by(tmp_path, 0).count("the run continues without this checkpoint") == 1


def slow_on_rank_1(world, config) -> None:
    def write(self, *given):
        if world.rank == 1 and threading.current_thread().name == "checkpoint save":
            time.sleep(0.5)
        return WRITE(self, *given)

    PreparedSave._write_own = write
    train(world, config)


def test_all_ranks_skip_alike(tmp_path):
    launch(slow_on_rank_1, 2, tmp_path, config_of(in_background(every_steps=2, when_busy="skip"), steps=60))
    steps = [step for step, _ in saved(tmp_path)]
    assert steps[0] == 2 and steps[-1] == 60 and 4 not in steps
    assert_all_whole(tmp_path)

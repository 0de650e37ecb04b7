"""What a run keeps over a cut: the losses to the last bit, every sample once, and a stop that all ranks hear."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import job, launch, said_by

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.metrics.training import read_train_log
from toolkit.train.schedule import Schedule
from toolkit.train.state import TrainingState
from toolkit.world.facts import World

CUT, STEPS = 8, 16
RANKS = 3  # of three numbers the order counts when they are added up
ITEMS = ("model", "optimizer", "schedule", "step", "cursor", "random")


def train(world, config) -> None:
    from toolkit.jobs import train_lm

    train_lm.main(world, config)


def losses(run_dir: Path) -> dict[int, str]:
    return {record.step: record.loss_hex for record in read_train_log(run_dir / "metrics" / "train.jsonl")}


class Forgetful(Checkpointer):
    """Loads a checkpoint without one item of state, which stays as a fresh process has it."""

    item: str

    def load(self, tensors: dict[str, Any], **given: Any) -> Any:
        fresh = copy.deepcopy(tensors)
        loaded = super().load(tensors, **given)
        if loaded and self.item in tensors:
            _copy_into(tensors[self.item], fresh[self.item])
        elif loaded:
            fresh_state = {"step": 0, "cursor": loaded.state["cursor"] | {"samples": 0}, "schedule": {"taken": 0}}
            loaded.state[self.item] = fresh_state[self.item]
        return loaded


def _copy_into(to: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _copy_into(to[name], value)
        else:
            to[name].copy_(value)


def train_forgetting_each_item(world, config) -> None:
    from toolkit.jobs import train_lm
    from toolkit.train import trainer

    trainer.Checkpointer = Forgetful
    for item in ITEMS:
        Forgetful.item = item
        train_lm.main(dataclasses.replace(world, run_dir=world.run_dir / item), config)


@pytest.fixture(scope="module")
def uncut(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("uncut")
    launch(train, RANKS, run_dir, job(steps=STEPS))
    return run_dir


def test_a_resumed_run_repeats_the_losses_of_the_uncut_one_to_the_last_bit(uncut, tmp_path):
    source = uncut / "checkpoints" / f"step-{CUT:08d}"
    launch(train, RANKS, tmp_path, job(steps=STEPS, source=source))
    after = {step: loss for step, loss in losses(uncut).items() if step > CUT}
    assert len(after) == STEPS - CUT
    assert losses(tmp_path) == after


def test_each_item_of_state_is_needed_for_that(uncut, tmp_path):
    source = uncut / "checkpoints" / f"step-{CUT:08d}"
    launch(train_forgetting_each_item, RANKS, tmp_path, job(steps=STEPS, source=source))
    after = {step: loss for step, loss in losses(uncut).items() if step > CUT}
    same = [item for item in ITEMS if losses(tmp_path / item) == after]
    assert same == []


def train_watched(world, config, ask_after: int) -> None:
    """Train; note which samples each rank reads; the last rank alone is asked to stop when a step ends."""
    from toolkit.jobs import train_lm
    from toolkit.train import trainer

    steps_of_loop = trainer.training_steps

    def watched(world, settings, state, step, take_samples, *given):
        with (world.run_dir / f"read-{world.attempt}-{world.rank}").open("w") as read:

            def take(samples):
                read.writelines(f"{sample}\n" for sample in samples)
                return take_samples(samples)

            for record in steps_of_loop(world, settings, state, step, take, *given):
                if record.step == ask_after and world.rank == world.size - 1:
                    world.stop_watch.asked = True
                yield record

    trainer.training_steps = watched
    train_lm.main(world, config)


def test_4_then_2_then_8_ranks_read_every_sample_once_and_stop_at_the_same_step(tmp_path):
    config = job(steps=20)
    for attempt, (ranks, ask_after) in enumerate([(4, 5), (2, 11), (8, 0)]):
        launch(train_watched, ranks, tmp_path, config, ask_after, attempt=attempt)

    read = Counter(int(line) for file in tmp_path.glob("read-*") for line in file.read_text().splitlines())
    assert read == Counter(range(20 * 8))
    records = read_train_log(tmp_path / "metrics" / "train.jsonl")
    assert [record.step for record in records] == list(range(1, 21))
    assert [record.world for record in records] == [4] * 6 + [2] * 6 + [8] * 8
    assert [record.samples for record in records] == [8 * step for step in range(1, 21)]
    assert "saved by 4 ranks\n" in said_by(tmp_path, 0, attempt=1)
    assert "saved by 2 ranks; ranks 2 and higher use new random streams\n" in said_by(tmp_path, 0, attempt=2)
    assert [said_by(tmp_path, rank, attempt=2) for rank in range(1, 8)] == [""] * 7
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")


def small_state(step: int = 0) -> TrainingState:
    model = torch.nn.Linear(2, 2)
    schedule = Schedule(1e-3, 100, 1, 0.1, "constant")
    return TrainingState(model, torch.optim.AdamW(model.parameters()), schedule, seed=1, step=step)


def damage(folder: Path) -> None:
    (shard,) = folder.glob("shard-*.h5")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


@pytest.fixture
def saved_steps(tmp_path) -> Path:
    checkpointer = Checkpointer(tmp_path, ALONE)
    for step in (10, 20, 30):
        small_state(step).save(checkpointer, ALONE)
    return tmp_path


def resumed_at(folder: Path, source: Path) -> int:
    state = small_state()
    state.resume(Checkpointer(folder, ALONE), ALONE, source=source)
    return state.step


def test_a_named_checkpoint_is_loaded_or_nothing_is(saved_steps):
    named = saved_steps / "step-00000030"
    assert resumed_at(saved_steps, named) == 30
    damage(named)
    with pytest.raises(CorruptCheckpointError) as refused:
        resumed_at(saved_steps, named)
    line = str(refused.value)
    assert "checkpoint step-00000030 is damaged: shard-00000-of-00001.h5: block 0" in line
    assert line.startswith(str(saved_steps)) and line.endswith(": step-00000010, step-00000020")
    assert named.is_dir()
    (named / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json: is missing"):
        resumed_at(saved_steps, named)


def test_what_was_saved_since_the_named_checkpoint_comes_first_and_nothing_older(saved_steps):
    named = saved_steps / "step-00000020"
    assert resumed_at(saved_steps, named) == 30
    damage(saved_steps / "step-00000030")
    assert resumed_at(saved_steps, named) == 20
    assert (saved_steps / "step-00000030.bad-0").is_dir()
    damage(named)
    with pytest.raises(CorruptCheckpointError, match=r"quick check: step-00000010$"):
        resumed_at(saved_steps, named)


def test_a_checkpoint_that_a_resume_set_aside_can_be_named_in_its_turn(saved_steps):
    aside = (saved_steps / "step-00000030").rename(saved_steps / "step-00000030.aside-001")
    damage(saved_steps / "step-00000020")
    with pytest.raises(CorruptCheckpointError, match=r"check: step-00000010, step-00000030\.aside-001$"):
        resumed_at(saved_steps, saved_steps / "step-00000020")
    assert resumed_at(saved_steps, aside) == 30


def test_another_runs_checkpoint_gives_way_to_what_was_saved_since(saved_steps, tmp_path_factory):
    own, other = tmp_path_factory.mktemp("own"), saved_steps / "step-00000020"
    assert resumed_at(own, other) == 20
    small_state(7).save(Checkpointer(own, ALONE), ALONE)
    assert resumed_at(own, other) == 7


def test_the_losses_are_those_of_one_process_where_shares_are_uneven(tmp_path):
    """Even ones are among the layouts of tests/parallel/test_parity.py."""
    config = job(steps=6, args={"dropout": 0.0}, micro_batch=2)
    for size in (1, RANKS):
        launch(train, size, tmp_path / str(size), config)
    alone = [record.loss for record in read_train_log(tmp_path / "1" / "metrics" / "train.jsonl")]
    together = [record.loss for record in read_train_log(tmp_path / str(RANKS) / "metrics" / "train.jsonl")]
    assert together == pytest.approx(alone, rel=1e-5)

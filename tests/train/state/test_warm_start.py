"""A run that begins with the weights of another: nothing else of it, nothing left out unsaid, nothing written there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from launch import job, launch, said_by
from torch import nn

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.metrics.training import read_train_log
from toolkit.train.schedule import Schedule
from toolkit.train.state import TrainingState
from toolkit.world.facts import World

ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")


class Body(nn.Module):
    def __init__(self, classes: int = 3, *, wide: int = 4, extra: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(2, wide)
        self.head = nn.Linear(wide, classes)
        if extra:
            self.gate = nn.Linear(2, 2)


def state_of(model: nn.Module, seed: int) -> TrainingState:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return TrainingState(model, torch.optim.AdamW(model.parameters()), Schedule(0.1, 10), seed=1)


def values(module: nn.Module) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in module.parameters()]


@pytest.fixture
def source(tmp_path: Path) -> tuple[TrainingState, Path]:
    state = state_of(Body(), 0)
    state.model.head(state.model.body(torch.ones(1, 2))).sum().backward()
    state.optimizer.step()
    state.schedule.advance()
    state.step, state.samples = 7, 70
    return state, state.save(Checkpointer(tmp_path / "old", ALONE), ALONE)


def begin(state: TrainingState, folder: Path, source: Path, **given: object) -> str:
    return state.resume(Checkpointer(folder / "new", ALONE), ALONE, source=source, take="weights", **given)


def everything_in(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    looks = {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    return looks | {str(folder): (folder.stat().st_ino, folder.stat().st_mtime_ns, b"")}


def test_the_weights_come_and_nothing_else(source, tmp_path):
    old, folder = source
    before = everything_in(folder.parent)
    state = state_of(Body(), 1)
    torch.manual_seed(5)
    drawn = torch.get_rng_state()
    assert begin(state, tmp_path, folder) == f"starting at step 0 with the weights of {folder}, saved at step 7"
    assert values(state.model) == values(old.model)
    assert (state.step, state.samples, state.schedule.taken) == (0, 0, 0)
    assert not state.optimizer.state and torch.equal(torch.get_rng_state(), drawn)
    state.save(Checkpointer(tmp_path / "new", ALONE), ALONE)
    assert everything_in(folder.parent) == before


def test_all_cannot_be_taken_of_what_is_no_training(tmp_path):
    imported = Checkpointer(tmp_path / "imported", ALONE).save(0, {"model": Body().state_dict()}, {})
    with pytest.raises(ToolkitError) as refused:
        state_of(Body(), 1).resume(Checkpointer(tmp_path / "new", ALONE), ALONE, source=imported)
    assert "\n" not in str(refused.value) and "has no training state to resume from" in str(refused.value)
    assert refused.value.fix == 'set checkpoint.take = "weights" to load only the weights'


def test_what_the_run_saved_since_comes_first_with_everything(source, tmp_path):
    _, folder = source
    state = state_of(Body(), 1)
    begin(state, tmp_path, folder)
    state.step = 3  # a step before that of the source
    state.save(Checkpointer(tmp_path / "new", ALONE), ALONE)
    again = state_of(Body(), 2)
    assert begin(again, tmp_path, folder).startswith("resumed at step 3 ")


@pytest.mark.parametrize("model", [lambda: Body(5), lambda: Body(5, extra=True)])
def test_a_head_of_another_size_stays_as_the_job_made_it(model, source, tmp_path):
    old, folder = source
    state = state_of(model(), 1)
    head = values(state.model.head)
    without = ["head", "gate"] if hasattr(state.model, "gate") else ["head"]
    assert begin(state, tmp_path, folder, without=without).endswith(f"saved at step 7, without {', '.join(without)}")
    assert values(state.model.head) == head
    assert values(state.model.body) == values(old.model.body)


def test_all_that_does_not_fit_is_named_at_once_and_no_weight_is_touched(source, tmp_path):
    _, folder = source
    state = state_of(Body(5, wide=6, extra=True), 1)
    del state.model.body.bias
    state.model.body.bias = None
    before = values(state.model)
    with pytest.raises(ToolkitError) as refused:
        begin(state, tmp_path, folder)
    line = str(refused.value)
    assert "lacks gate.bias, gate.weight; contains body.bias, which this job does not have; has other shapes: " in line
    assert "body.weight (saved: [4, 2], this job: [6, 2]), head.bias (saved: [3], this job: [5]), head.weight" in line
    assert line.endswith("Fix: set checkpoint.without to the tensors that keep this job's values")
    assert values(state.model) == before
    with pytest.raises(ToolkitError, match=r"checkpoint\.without: neither this model nor .* has haed"):
        begin(state_of(Body(), 1), tmp_path, folder, without=["haed"])


def test_of_many_weights_that_do_not_fit_the_first_ten_are_named(tmp_path):
    def state(width: int) -> TrainingState:
        return state_of(nn.Sequential(*(nn.Linear(width, width) for _ in range(6))), 0)

    folder = state(2).save(Checkpointer(tmp_path / "old", ALONE), ALONE)
    with pytest.raises(ToolkitError) as refused:
        begin(state(3), tmp_path, folder)
    assert refused.value.message.count("(saved: ") == 10
    assert refused.value.message.endswith("4.weight (saved: [2, 2], this job: [3, 3]) and 2 more")


def test_a_source_that_is_damaged_missing_or_the_runs_own_is_refused(source, tmp_path):
    _, folder = source
    with pytest.raises(NotFoundError, match=r"not a checkpoint folder\. Fix: pass an existing step-"):
        begin(state_of(Body(), 1), tmp_path, folder.with_name("step-00000009"))
    own = dataclasses.replace(ALONE, run_dir=folder.parents[1])
    with pytest.raises(ToolkitError, match=r"checkpoint\.take: step-00000007 is a checkpoint of this run"):
        state_of(Body(), 1).resume(Checkpointer(folder.parent, own), own, source=folder, take="weights")
    (shard,) = folder.glob("shard-*.h5")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="step-00000007 is damaged"):
        begin(state_of(Body(), 1), tmp_path, folder)


def train(world, config) -> None:
    from toolkit.jobs import train_lm

    train_lm.main(world, config)


def test_train_lm_begins_with_weights_on_another_number_of_ranks(tmp_path):
    launch(train, 2, tmp_path / "old", job(steps=8, args={"tied": False}))
    source = tmp_path / "old" / "checkpoints" / "step-00000008"
    config = job(steps=4, args={"tied": False}, source=source, seed=9)
    table = config.checkpoint.model_copy(update={"take": "weights", "without": ["head"]})
    launch(train, 1, tmp_path / "new", config.model_copy(update={"checkpoint": table}))
    assert f"starting at step 0 with the weights of {source}, saved at step 8, without head" in said_by(
        tmp_path / "new", 0
    )
    records = read_train_log(tmp_path / "new" / "metrics" / "train.jsonl")
    assert [(record.step, record.samples) for record in records] == [(1, 8), (2, 16), (3, 24), (4, 32)]


def test_what_shares_the_memory_of_what_is_taken_cannot_stay(tmp_path):
    model = Body(classes=2, wide=2)
    model.head.weight = model.body.weight
    folder = state_of(model, 2).save(Checkpointer(tmp_path / "tied", ALONE), ALONE)
    tied = Body(classes=2, wide=2)
    tied.head.weight = tied.body.weight
    with pytest.raises(ToolkitError, match=r"head\.weight shares its memory with body\.weight, which is loaded"):
        begin(state_of(tied, 3), tmp_path, folder, without=["head"])
    assert "without head, body" in begin(state_of(tied, 3), tmp_path, folder, without=["head", "body"])

"""Which checkpoints stay: what is promised is kept, and nothing good goes for something damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from forged import signed
from hypothesis import given
from hypothesis import strategies as st

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder import retention as retention_module
from toolkit.checkpoint.folder.retention import Retention, recorded_metric, surplus_folders, surplus_steps
from toolkit.checkpoint.format.layout import MANIFEST, committed_steps
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.world.facts import World

METRICS = st.sampled_from([None, math.nan, math.inf, -math.inf, -1.0, 0.0, 1.0])
FOLDERS = st.dictionaries(st.integers(0, 14), st.tuples(METRICS, st.booleans()), max_size=12)
RETENTIONS = st.builds(Retention, st.integers(1, 4), st.integers(0, 7), st.integers(0, 4), st.booleans())
IN_USE = st.frozensets(st.integers(0, 14), max_size=2)


def kept(folders: dict, retention: Retention, in_use: frozenset[int] = frozenset()) -> dict:
    metrics = {step: metric for step, (metric, _) in folders.items()}
    gone = surplus_steps(metrics, lambda step: folders[step][1], retention, in_use)
    assert gone == sorted(set(gone)) and set(gone) <= set(folders)
    return {step: found for step, found in folders.items() if step not in gone}


@given(FOLDERS, RETENTIONS, IN_USE)
def test_what_is_promised_stays(folders, retention, in_use):
    left = kept(folders, retention, in_use)
    whole = sorted(step for step, (_, is_whole) in folders.items() if is_whole)
    assert set(whole[-retention.last :]) <= set(left)
    assert {step for step in folders if retention.every and step % retention.every == 0} <= set(left)
    assert in_use & set(folders) <= set(left)
    rated = {step: folders[step][0] for step in whole if folders[step][0] is not None}
    rated = {step: value for step, value in rated.items() if not math.isnan(value)}
    stayed, went = ([rated[step] for step in rated if (step in left) is there] for there in (True, False))
    if went and retention.best:
        sign = 1 if retention.lower_is_better else -1
        best_gone = min(sign * value for value in went)
        assert sum(sign * value <= best_gone for value in stayed) >= retention.best


@given(FOLDERS, RETENTIONS, IN_USE)
def test_the_last_one_that_is_whole_never_goes(folders, retention, in_use):
    left = kept(folders, retention, in_use)
    assert bool(left) == bool(folders)
    if any(is_whole for _, is_whole in folders.values()):
        assert any(is_whole for _, is_whole in left.values())
    else:
        assert left == folders


@given(FOLDERS, RETENTIONS, IN_USE)
def test_a_second_look_removes_nothing_more(folders, retention, in_use):
    left = kept(folders, retention, in_use)
    assert kept(left, retention, in_use) == left


@given(FOLDERS, RETENTIONS)
def test_no_more_stays_than_was_asked_for(folders, retention):
    left = kept(folders, retention)
    if all(is_whole for _, is_whole in folders.values()):
        others = [step for step in left if not (retention.every and step % retention.every == 0)]
        assert len(others) <= retention.last + retention.best


def test_only_what_decides_is_looked_at():
    """On a file system that thousands of ranks share, a look at a checkpoint is thousands of calls."""
    asked = []
    metrics = {step: float(step) for step in range(1000)}
    gone = surplus_steps(metrics, lambda step: not asked.append(step), Retention(3, 10, 2))
    assert sorted(asked) == [0, 1, 997, 998, 999]
    assert set(metrics) - set(gone) == {*range(0, 1000, 10), 1, 997, 998, 999}


def test_of_equal_ones_the_first_is_the_best():
    folders = dict.fromkeys(range(5), (2.0, True))
    assert set(kept(folders, Retention(1, best=1))) == {0, 4}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"last": 0}, "keep_last: expected at least 1, got 0"),
        ({"every": -1}, "keep_every: expected at least 0, got -1"),
    ],
)
def test_a_retention_that_keeps_nothing_is_refused(wrong, said):
    with pytest.raises(ToolkitError, match=said):
        Retention(**wrong)


def world(attempt: int = 0) -> World:
    return World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt=attempt)


def save(checkpoints: Checkpointer, step: int, loss: float | None = None) -> Path:
    state = {} if loss is None else {"metric": {"name": "loss", "value": loss}}
    return checkpoints.save(step, {"x": torch.tensor([float(step)])}, state)


def damage(folder: Path) -> None:
    shard = next(folder.glob("shard-*.h5"))
    shard.write_bytes(shard.read_bytes()[:-1])


def test_the_best_and_every_tenth_outlive_the_last(tmp_path):
    checkpoints = Checkpointer(tmp_path, world(), retention=Retention(2, every=20, best=1))
    losses = {5: 3.0, 10: 1.0, 15: 2.0, 20: 4.0, 25: float("nan"), 30: 5.0, 35: 6.0}
    for step, loss in losses.items():
        save(checkpoints, step, loss)
    assert list(committed_steps(tmp_path)) == [10, 20, 30, 35]
    assert recorded_metric(tmp_path / "step-00000010") == 1.0
    assert recorded_metric(tmp_path / "step-00000099") is None


@pytest.mark.parametrize("state", [{"metric": {"$tuple": 5}}, {"$dict": [5]}, {"$tuple": []}, [], None])
def test_a_state_that_somebody_made_up_has_no_metric(tmp_path, state):
    folder = save(Checkpointer(tmp_path, world()), 1, 0.5)
    (folder / MANIFEST).write_text(signed({**json.loads((folder / MANIFEST).read_text()), "state": state}))
    assert recorded_metric(folder) is None


def test_where_the_newest_are_damaged_the_newest_whole_one_stays(tmp_path):
    checkpoints = Checkpointer(tmp_path, world(), keep_last=9)
    for step in (1, 2, 3, 4):
        save(checkpoints, step)
    for step in (3, 4):
        damage(tmp_path / f"step-{step:08d}")
    assert [folder.name for folder in surplus_folders(tmp_path, Retention(1))] == ["step-00000001"]
    damage(tmp_path / "step-00000002")
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
    assert surplus_folders(tmp_path, Retention(1)) == []


def test_a_damaged_best_keeps_the_next_best(tmp_path):
    checkpoints = Checkpointer(tmp_path, world(), keep_last=9)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.7), (4, 0.9)):
        save(checkpoints, step, loss)
    damage(tmp_path / "step-00000002")
    assert [path.name for path in surplus_folders(tmp_path, Retention(1, best=1))] == ["step-00000002", "step-00000003"]


def test_where_a_checkpoint_cannot_be_read_all_stay(tmp_path, monkeypatch, capsys):
    """A host that reads nothing must not take the best for one without a metric, now or when it reads again."""
    checkpoints = Checkpointer(tmp_path, world(), retention=Retention(1, best=1))
    for step, loss in ((1, 0.1), (2, 0.7)):
        save(checkpoints, step, loss)
    with monkeypatch.context() as patch:
        patch.setattr(retention_module, "read_body", fails_to_read)
        retention_module._metric_in.cache_clear()
        save(checkpoints, 3, 0.8)
    assert "keeping older checkpoints: " in capsys.readouterr().err
    assert list(committed_steps(tmp_path)) == [1, 2, 3]
    save(checkpoints, 4, 0.9)
    assert list(committed_steps(tmp_path)) == [1, 4]


def fails_to_read(folder: Path) -> None:
    raise OwnFailureError("cannot be read on this host", where=str(folder))


def test_what_an_attempt_began_from_outlives_its_saves(tmp_path):
    for step in (1, 2):
        save(Checkpointer(tmp_path, world(0), keep_last=3), step)
    checkpoints = Checkpointer(tmp_path, world(1), keep_last=1)
    assert checkpoints.load({"x": torch.zeros(1)}).step == 2
    for step in (3, 4):
        save(checkpoints, step)
    assert list(committed_steps(tmp_path)) == [2, 4]
    save(Checkpointer(tmp_path, world(2), keep_last=1), 5)
    assert list(committed_steps(tmp_path)) == [5]


def test_another_runs_step_of_the_same_number_is_not_in_use(tmp_path):
    source = save(Checkpointer(tmp_path / "other", world()), 1)
    own = Checkpointer(tmp_path / "own", world(), keep_last=1)
    assert own.load({"x": torch.zeros(1)}, source=source).step == 1
    for step in (1, 2):
        save(own, step)
    assert list(committed_steps(tmp_path / "own")) == [2]


def test_a_metric_that_is_not_a_number_is_never_among_the_best():
    folders = {0: (math.nan, True), 1: (1.0, True), 2: (math.nan, True), 3: (None, True), 4: (None, True)}
    assert set(kept(folders, Retention(1, best=4))) == {1, 4}


def test_a_metric_larger_than_any_float_is_infinite(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, world())
    for step, value in enumerate([10**400, -(10**400)]):
        folder = checkpoints.save(step, {"x": torch.zeros(1)}, {"metric": {"name": "loss", "value": value}})
        assert recorded_metric(folder) == (math.inf if value > 0 else -math.inf)

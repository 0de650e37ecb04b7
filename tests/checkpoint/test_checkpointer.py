"""Which checkpoint stands, which goes, and which is loaded."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.commit import commit
from toolkit.checkpoint.folder.deletion import await_deletions, discard, discard_later
from toolkit.checkpoint.format.layout import committed_steps
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.layout import RunDirectory
from toolkit.world.facts import World


def world(attempt: int = 0) -> World:
    return World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt=attempt)


def x(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([float(value)])}


def value_of(folder: Path) -> float:
    """The value in a checkpoint, read without the checkpointer."""
    wanted = x(-1.0)
    Checkpointer(folder.parent / "unused", world()).load(wanted, source=folder)
    return float(wanted["x"])


def test_the_last_few_are_kept_and_the_newest_always(tmp_path):
    for keep_last in (1, 3):
        directory = tmp_path / str(keep_last)
        checkpoints = Checkpointer(directory, world(), keep_last=keep_last)
        for step in range(0, 50, 10):
            assert checkpoints.save(step, x(step), {}) == directory / f"step-{step:08d}"
        assert list(committed_steps(directory)) == list(range(0, 50, 10))[-keep_last:]
        assert await_deletions(30)
        (spare,) = set(directory.glob("step-*")) - set(committed_steps(directory).values())
        assert ".removed-" in spare.name
        assert checkpoints.latest() == 40
    with pytest.raises(ToolkitError, match="keep_last: expected at least 1, got 0"):
        Checkpointer(tmp_path, world(), keep_last=0)


def test_deletions_keep_nobody_waiting_and_come_one_at_a_time(tmp_path, monkeypatch):
    let_go, begun, ended = threading.Event(), [], []
    remove = shutil.rmtree

    def slow_remove(folder: Path) -> None:
        begun.append((folder.name, len(ended)))
        assert let_go.wait(30)
        remove(folder)
        ended.append(folder.name)

    Checkpointer(tmp_path, world(0)).save(1, x(1), {})
    monkeypatch.setattr("toolkit.checkpoint.checkpointer._DELETIONS_S", 0.01)
    monkeypatch.setattr(shutil, "rmtree", slow_remove)
    for checkpoints in [Checkpointer(tmp_path, world(1)) for _ in range(3)]:
        checkpoints.save(3, x(3), {})
    going = ["step-00000003.replaced-1", "step-00000003.replaced-1-2"]
    stay = ["step-00000001", "step-00000003"]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == sorted([*going, *stay])
    assert ended == []
    let_go.set()
    assert await_deletions(30)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == stay
    assert sorted(ended) == going and [before for _, before in begun] == [0, 1]


def test_a_save_waits_for_deletions_before_it(tmp_path):
    """Where the disk holds two checkpoints, the third needs the room of the first."""
    checkpoints = Checkpointer(tmp_path, world(), keep_last=1)
    folder = tmp_path / "step-00000001.removed-0"
    folder.mkdir()
    for number in range(5000):
        (folder / str(number)).touch()
    discard_later(folder)
    checkpoints.save(2, x(2), {})
    assert not folder.exists()


def test_two_may_delete_the_same_folder(tmp_path, capsys):
    """A new attempt finishes deletions that an old one, given up on, may still be at."""
    folder = tmp_path / "step-00000001.removed-0"
    folder.mkdir()
    for number in range(2000):
        (folder / str(number)).touch()
    threads = [threading.Thread(target=discard, args=(folder,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not folder.exists()
    assert capsys.readouterr().err == ""


def test_a_fork_deletes_though_its_parent_was_at_it(tmp_path, monkeypatch):
    """The parent's threads are not the child's, and it must not wait for them."""
    let_go, remove = threading.Event(), shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda folder: let_go.wait(30) and remove(folder))
    (tmp_path / "parent's").mkdir()
    discard_later(tmp_path / "parent's")
    child = os.fork()
    if child == 0:
        monkeypatch.undo()
        (tmp_path / "child's").mkdir()
        discard_later(tmp_path / "child's")
        os._exit(0 if await_deletions(10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["parent's"]
    let_go.set()
    assert await_deletions(30)


def test_a_script_that_ends_gives_the_last_deletion_time(tmp_path):
    """Nobody comes after the last save of a run, so what it replaced would stay."""
    script = (
        "import pathlib, sys; from toolkit.checkpoint.folder.deletion import discard_later;"
        "folder = pathlib.Path(sys.argv[1]); folder.mkdir();"
        "[(folder / str(number)).touch() for number in range(5000)]; discard_later(folder)"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "x"], check=True)
    assert list(tmp_path.glob("step-*")) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((1, [torch.ones(1)], {}), "rank 0: tensors: expected a dict, got list; there is no earlier checkpoint. Fix: pass a dict of tensors, as in "),
        ((1, torch.ones(1), {}), "rank 0: tensors: expected a dict, got Tensor; "),
        ((1, x(1), [1]), "rank 0: state: expected a dict, got list; "),
        ((1, x(1), None), "rank 0: state: expected a dict, got NoneType; "),
        (("1", x(1), {}), "step: expected a step number, got '1'. Fix: pass the number of completed steps"),
        ((1.0, x(1), {}), "step: expected a step number, got 1.0. Fix: "),
    ],
)  # fmt: skip
def test_an_argument_of_another_kind_is_named_and_nothing_is_written(tmp_path, given, said):
    checkpoints = Checkpointer(tmp_path, world())
    for save in (checkpoints.save, checkpoints.save_in_background):
        with pytest.raises(ToolkitError) as refused:
            save(*given)
        assert type(refused.value) is ToolkitError and said in str(refused.value)
    with pytest.raises(
        ToolkitError, match=r"when_busy: expected \"wait\" or \"skip\", got 'later'\. Fix: pass one of these two"
    ):
        checkpoints.save_in_background(1, x(1), {}, when_busy="later")
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("source", [False, True])
def test_a_load_into_no_dict_is_refused_with_the_fix(tmp_path, source):
    saved = Checkpointer(tmp_path, world()).save(1, x(1), {})
    with pytest.raises(
        ToolkitError, match=r"tensors: expected a dict, got list\. Fix: pass a dict of tensors, as in "
    ) as refused:
        Checkpointer(tmp_path, world()).load([torch.ones(1)], source=saved if source else None)
    assert type(refused.value) is ToolkitError


def test_a_step_saved_twice_by_one_attempt_is_kept_as_it_is(tmp_path):
    checkpoints = Checkpointer(tmp_path, world())
    first = checkpoints.save(1, x(1), {})
    written = (first / "manifest.json").stat().st_ino
    assert checkpoints.save(1, x(1), {}) == first
    assert (first / "manifest.json").stat().st_ino == written


def test_a_step_that_an_older_attempt_saved_is_replaced(tmp_path):
    Checkpointer(tmp_path, world(0)).save(1, x(1), {})
    folder = Checkpointer(tmp_path, world(1)).save(1, x(2), {})
    assert value_of(folder) == 2
    assert read_manifest(folder).attempt == 1
    assert await_deletions(30)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


def test_a_commit_that_cannot_be_synced_gives_the_older_one_its_name_back(tmp_path, monkeypatch):
    for step in (1, 2):
        Checkpointer(tmp_path, world(0)).save(step, x(step), {})
    sync = os.fsync

    def failing(descriptor: int) -> None:
        final = tmp_path / "step-00000002"
        is_folder = Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path
        if is_folder and final.exists() and read_manifest(final).attempt == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    checkpoints = Checkpointer(tmp_path, world(1))
    with monkeypatch.context() as context, pytest.raises(OwnFailureError) as failed:
        context.setattr(os, "fsync", failing)
        checkpoints.save(2, x(20), {})
    assert "checkpoint of step 2 was not saved: rank 0: Input/output error" in failed.value.message
    assert "; step 2 is the last good checkpoint" in failed.value.message
    assert value_of(tmp_path / "step-00000002") == 2
    checkpoints.save(2, x(20), {})
    assert value_of(tmp_path / "step-00000002") == 20


def test_a_line_that_the_run_left_is_not_resumed(tmp_path, capsys):
    """Resume from step 10 where 20 and 30 exist; the next save is step 15, and 15 is what resumes then."""
    old = Checkpointer(tmp_path, world(0))
    for step in (10, 20, 30):
        old.save(step, x(step), {})
    new = Checkpointer(tmp_path, world(1), keep_last=1)
    assert new.load(x(0), source=tmp_path / "step-00000010").step == 10
    new.save(15, x(15), {})
    assert new.latest() == 15
    assert Checkpointer(tmp_path, world(2)).load(x(0)).step == 15
    # What was left is kept for its owner, under a name that nothing loads.
    assert (tmp_path / "step-00000030.left-1").is_dir()
    assert "step-00000030 belongs to a history that this run has abandoned" in capsys.readouterr().err


def test_state_and_optimizer_values_come_back_with_their_types(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    checkpoints = Checkpointer(tmp_path, world())
    checkpoints.save(1, {"optimizer": optimizer.state_dict()}, {"best": float("inf"), "epoch": (1, 2)})
    other = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    other.param_groups[0]["params"][0].grad = torch.zeros(2, 3)
    wanted = {"optimizer": {**optimizer.state_dict(), "param_groups": other.state_dict()["param_groups"]}}
    loaded = checkpoints.load(wanted)
    assert wanted["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert wanted["optimizer"]["param_groups"][0]["betas"] == (0.8, 0.9)
    assert loaded.state == {"best": float("inf"), "epoch": (1, 2)}


def nested_tensor(layout: torch.layout) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_not_loaded_into(tmp_path, layout):
    checkpoints = Checkpointer(tmp_path, world())
    saved = checkpoints.save(1, x(1), {})
    for source in (None, saved):
        with pytest.raises(ToolkitError, match="x: is a nested tensor, which a checkpoint cannot contain"):
            checkpoints.load({"x": nested_tensor(layout)}, source=source)


@pytest.mark.parametrize(
    ("tensors", "state", "name"),
    [
        ({"a": {"callback": print}}, {}, "a.callback"),
        ({"when": {1, object()}}, {}, "when"),
        ({"weights": torch.eye(3).to_sparse()}, {}, "weights"),
        ({"words": nested_tensor(torch.jagged)}, {}, "words: is a nested tensor, which a checkpoint cannot contain"),
        (x(1), {"history": {"path": object()}}, r"state\['history'\]\['path'\]"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tmp_path, tensors, state, name):
    checkpoints = Checkpointer(tmp_path, world())
    with pytest.raises(ToolkitError, match=name) as caught:
        checkpoints.save(1, tensors, state)
    assert caught.value.fix
    assert list(tmp_path.glob("step-*")) == []


def test_keys_tell_what_can_be_asked_for(tmp_path):
    checkpoints = Checkpointer(tmp_path, world())
    assert checkpoints.keys() == frozenset()
    checkpoints.save(1, {"random": {"rank-00000": torch.zeros(1)}, **x(1)}, {})
    assert checkpoints.keys() == {"random.rank-00000", "x"}
    wanted = {"random": {"rank-00007": torch.full((1,), 7.0)}, **x(0)}
    loaded = checkpoints.load(wanted, optional=["random"])
    assert loaded.missing == ("random.rank-00007",)
    assert float(wanted["random"]["rank-00007"]) == 7 and float(wanted["x"]) == 1


def test_precision_may_change_between_saving_and_loading(tmp_path):
    checkpoints = Checkpointer(tmp_path, world())
    checkpoints.save(1, {"x": torch.tensor([1.0, 2.5])}, {})
    wanted = {"x": torch.zeros(2, dtype=torch.bfloat16)}
    checkpoints.load(wanted)
    assert wanted["x"].tolist() == [1.0, 2.5]


def test_an_attempt_that_was_given_up_on_cannot_save(run_directory):
    """Ranks on a node that was cut off may live on, and still see the disk."""
    claim_attempt(run_directory)
    old = Checkpointer(run_directory.checkpoints, world(0))
    kept = old.save(1, x(1), {})
    claim_attempt(run_directory)
    new = Checkpointer(run_directory.checkpoints, world(1))
    newest = new.save(3, x(3), {})
    with pytest.raises(OwnFailureError, match="attempt 1 owns the run now"):
        old.save(2, x(2), {})
    part = run_directory.checkpoints / "step-00000002.part-0-1"
    part.mkdir()
    with pytest.raises(OwnFailureError, match="was abandoned"):  # claimed while the old one was writing
        commit(part, run_directory.checkpoints / "step-00000002", 0, replace=True)
    assert list(committed_steps(run_directory.checkpoints).values()) == [kept, newest]


@pytest.fixture
def listing_is_old(run_directory, monkeypatch):
    """Attempt 0 sees no later one, as a host with cached attributes (NFS) does for a while."""
    claim_attempt(run_directory)
    old = Checkpointer(run_directory.checkpoints, world(0))
    claim_attempt(run_directory)
    monkeypatch.setattr(RunDirectory, "attempt_numbers", lambda _run: [0])
    return old


@pytest.mark.parametrize("step", [110, 120])
def test_an_attempt_that_was_given_up_on_leaves_newer_checkpoints_alone(run_directory, listing_is_old, step):
    new = Checkpointer(run_directory.checkpoints, world(1))
    newest = new.save(120, x(120), {})
    with pytest.raises(OwnFailureError, match="attempt 1 owns the run now"):
        listing_is_old.save(step, x(0), {})
    assert list(run_directory.checkpoints.glob("step-*")) == [newest]
    assert value_of(newest) == 120


def test_nothing_is_moved_where_one_of_several_is_newer(run_directory, listing_is_old):
    checkpoints = run_directory.checkpoints
    for step, attempt in ((20, 0), (30, 1)):
        Checkpointer(checkpoints, world(attempt)).save(step, x(step), {})
    with pytest.raises(OwnFailureError, match="was abandoned"):
        listing_is_old.save(10, x(10), {})
    assert list(committed_steps(checkpoints)) == [20, 30]


def test_a_damaged_checkpoint_in_the_way_does_not_keep_a_run_from_saving(run_directory, listing_is_old):
    later = Checkpointer(run_directory.checkpoints, world(0)).save(20, x(20), {})
    (later / "manifest.json").write_text("{")
    folder = listing_is_old.save(10, x(10), {})
    assert value_of(folder) == 10
    assert (run_directory.checkpoints / "step-00000020.left-0").is_dir()


def test_a_checkpoint_that_cannot_be_read_stays_where_it_is(run_directory, listing_is_old):
    later = Checkpointer(run_directory.checkpoints, world(1)).save(20, x(20), {})
    (later / "manifest.json").rename(later / "kept")
    (later / "manifest.json").mkdir()  # root reads any file; this is an error that it gets, too
    with pytest.raises(OwnFailureError, match=r"step 10 was not saved: rank 0: Is a directory: .*manifest\.json"):
        listing_is_old.save(10, x(10), {})
    assert list(run_directory.checkpoints.glob("step-*")) == [later]

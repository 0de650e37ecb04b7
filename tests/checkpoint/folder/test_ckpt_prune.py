"""`toolkit ckpt prune` removes what retention does not keep and what was left behind, and nothing of a living run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from ckpt_runs import SHARD, flip, save

from toolkit.checkpoint.folder.writer_lock import WRITER
from toolkit.checkpoint.format.layout import committed_steps
from toolkit.rundir.files import read_json, write_json


@pytest.fixture
def run(toolkit) -> Path:
    """A run that has ended, with the checkpoints of five steps."""
    directory = toolkit.submit(toolkit.job("true", more="[checkpoint]\nkeep_last = 4\n"))
    toolkit.ok("wait", "last")
    for step in (10, 20, 30, 40, 50):
        save(directory.path, step, {"x": torch.ones(5)}, {"metric": {"name": "loss", "value": abs(step - 20)}})
    return directory.path


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.name != WRITER)


def steps(run: Path) -> list[int]:
    return list(committed_steps(run / "checkpoints"))


def put(run: Path, *suffixes: str) -> None:
    """Copies of step 50 under other names."""
    for suffix in suffixes:
        shutil.copytree(run / "checkpoints" / "step-00000050", run / "checkpoints" / suffix)


def test_what_the_run_keeps_is_kept(toolkit, run):
    text = toolkit.ok("ckpt", "prune", "last")
    assert steps(run) == [20, 30, 40, 50] == [int(name[5:]) for name in names(run)]
    lines = text.splitlines()
    assert lines[0].startswith("step-00000010: ") and lines[0].endswith(" kB, beyond retention")
    assert lines[-1].startswith("removed 1 folder, ") and lines[-1].endswith("steps kept: 20, 30, 40, 50")
    assert "checked names, sizes and manifests; --full checks every byte" in lines[1]


def test_one_that_verifies_stays_when_all_bytes_are_read(toolkit, run):
    """The newest two look whole, and are not: by names and sizes alone every good one would go."""
    for step in (40, 50):
        flip(run / "checkpoints" / f"step-000000{step}" / SHARD, -1)
    planned = toolkit.ok("ckpt", "prune", "last", "--keep-last", 1, "--dry-run")
    assert planned.splitlines()[-1].endswith("steps kept: 50") and "does not count as kept" not in planned
    said = toolkit("ckpt", "prune", "last", "--keep-last", 1, "--full")
    assert said.code == 0 and steps(run) == [30, 40, 50]
    assert "checked every byte\n" in said.out
    assert f"step-00000050: does not count as kept: {SHARD} block 0: was changed" in said.out
    assert said.err.splitlines() == [f"toolkit: reading all of step-000000{step}" for step in (50, 40, 30)]


def test_where_fewer_verify_than_are_kept_none_goes(toolkit, run):
    for step in (10, 20, 30, 40):
        flip(run / "checkpoints" / f"step-000000{step}" / SHARD, -1)
    answer = json.loads(toolkit.ok("ckpt", "prune", "last", "--keep-last", 2, "--full", "--json"))
    assert answer["look"] == "full" and answer["removed"] == [] and answer["steps"] == [10, 20, 30, 40, 50]
    assert [Path(one["path"]).name[-2:] for one in answer["damaged"]] == ["40", "30", "20", "10"]


def test_a_replaced_one_stays_where_the_newer_one_does_not_verify(toolkit, run):
    put(run, "step-00000050.replaced-0")
    flip(run / "checkpoints" / "step-00000050" / SHARD, -1)
    toolkit.ok("ckpt", "prune", "last", "--full")
    assert "step-00000050.replaced-0" in names(run)


def test_a_step_is_not_pruned_and_the_right_command_is_named(toolkit, run):
    said = toolkit("ckpt", "prune", "last:20", "--keep-last", 1)
    assert (said.code, said.out) == (2, "") and said.err.endswith("Fix: `toolkit ckpt prune last`\n")
    assert steps(run) == [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("options", "stay"),
    [
        (["--keep-last", 2], [40, 50]),
        (["--keep-last", 1, "--keep-every", 20], [20, 40, 50]),
        (["--keep-last", 1, "--keep-best", 1], [20, 50]),
        (["--keep-last", 99], [10, 20, 30, 40, 50]),
    ],
)
def test_options_say_otherwise_and_a_dry_run_touches_nothing(toolkit, run, options, stay):
    before = names(run)
    planned = toolkit.ok("ckpt", "prune", run, *options, "--dry-run")
    assert names(run) == before
    assert planned.splitlines()[-1].startswith("would remove ")
    done = toolkit.ok("ckpt", "prune", run, *options)
    assert done == planned.replace("would remove", "removed") and steps(run) == stay


def test_what_was_left_behind_goes_and_what_was_set_aside_on_request(toolkit, run):
    aside = ["step-00000050.bad-0", "step-00000060.left-1", "step-00000060.aside-002"]
    put(run, "step-00000060.part-0", "step-00000060.stale-0", "step-00000060.removed-0", *aside)
    put(run, "step-00000050.replaced-0", "step-00000070.replaced-0", "another.folder")
    text = toolkit.ok("ckpt", "prune", "last")
    kept = [f"step-000000{step}" for step in (20, 30, 40, 50)]
    # A save that never came has left the step that it was to replace: the next attempt gives that its name back.
    stays = [*kept, "another.folder", "step-00000070.replaced-0"]
    assert names(run) == sorted([*stays, *aside])
    assert "step-00000060.part-0: " in text and "an interrupted save" in text
    toolkit.ok("ckpt", "prune", "last", "--aside")
    assert names(run) == sorted(stays)


def test_a_replaced_one_stays_where_the_newer_one_is_damaged(toolkit, run):
    put(run, "step-00000050.replaced-0")
    (run / "checkpoints" / "step-00000050" / SHARD).unlink()
    toolkit.ok("ckpt", "prune", "last")
    assert "step-00000050.replaced-0" in names(run)


def test_json_names_what_went(toolkit, run):
    answer = json.loads(toolkit.ok("ckpt", "prune", "last", "--json", "--keep-last", 3))
    assert [Path(one["path"]).name for one in answer["removed"]] == ["step-00000010", "step-00000020"]
    assert answer["steps"] == [30, 40, 50] and not answer["dry_run"]
    assert all(one["size_bytes"] > 0 and not one["left"] and one["why"] for one in answer["removed"])


@pytest.mark.parametrize("name", ["step-00000010", "step-00000060.aside-001"])
def test_where_the_run_was_told_to_begin_stays(toolkit, run, name):
    put(run, "step-00000060.aside-001")
    record = read_json(run / "record.json")
    record["job"]["checkpoint"]["source"] = str(run / "checkpoints" / name)
    write_json(run / "record.json", record)
    toolkit.ok("ckpt", "prune", "last", "--keep-last", 1, "--aside")
    assert names(run) == sorted([name, "step-00000050"])


def test_a_living_run_is_left_alone(toolkit):
    directory = toolkit.submit(toolkit.job("sleep 60"))
    for step in (10, 20):
        save(directory.path, step, {"x": torch.ones(5)})
    said = toolkit("ckpt", "prune", "last", "--keep-last", 1)
    assert (said.code, said.out) == (1, "") and directory.run_id in said.err and "toolkit cancel" in said.err
    assert steps(directory.path) == [10, 20]
    assert "step-00000010: " in toolkit.ok("ckpt", "prune", "last", "--keep-last", 1, "--dry-run")
    # Its checkpoints folder is no way around.
    assert toolkit("ckpt", "prune", directory.checkpoints, "--keep-last", 1).code == 1
    toolkit.ok("cancel", "last")
    toolkit("wait", "last")
    toolkit.ok("ckpt", "prune", directory.checkpoints, "--keep-last", 1)
    assert steps(directory.path) == [20]


def test_a_folder_of_no_run_needs_to_be_told(toolkit, tmp_path):
    for step in (1, 2):
        save(tmp_path / "alone", step, {"x": torch.ones(5)})
    put_aside = tmp_path / "alone" / "checkpoints" / "step-00000003.part-0"
    put_aside.mkdir()
    said = toolkit("ckpt", "prune", tmp_path / "alone")
    assert said.code == 2 and "pass --keep-last" in said.err
    toolkit.ok("ckpt", "prune", tmp_path / "alone", "--keep-last", 1)
    assert steps(tmp_path / "alone") == [2] and put_aside.exists()  # somebody may be writing it
    said = toolkit("ckpt", "prune", tmp_path / "alone" / "checkpoints" / "step-00000002", "--keep-last", 1)
    assert said.code == 2 and "expected a run, got a single checkpoint" in said.err
    assert toolkit("ckpt", "prune", tmp_path, "--keep-last", 1).code == 4


def test_a_deletion_that_stops_halfway_leaves_no_checkpoint(toolkit, run):
    """A folder in it that is busy: what is left has another name, and the next prune finishes it."""
    busy = run / "checkpoints" / "step-00000010" / "busy"
    busy.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", busy]).returncode:
        pytest.skip("mounting a small file system needs root")
    moved = run / "checkpoints" / "step-00000010.removed-0"
    try:
        said = toolkit("ckpt", "prune", "last")
    finally:
        subprocess.run(["umount", moved / "busy"], check=True)
    assert said.code == 125 and "NOT DELETED" in said.out and "could not be deleted" in said.err
    assert steps(run) == [20, 30, 40, 50] and moved.exists()
    assert "step-00000010.removed-0: 0 bytes, partly deleted\n" in toolkit.ok("ckpt", "prune", "last")
    assert len(names(run)) == 4

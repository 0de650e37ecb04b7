"""An old checkpoint's files serve the next save only where they are plainly this run's own: nothing outside is touched."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from ckpt_runs import ALONE, SHARD
from real_ranks import run_ranks
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.deletion import await_deletions
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.layout import committed_steps
from toolkit.world.facts import World

ROWS = 600_000


def x(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((3000,), value)}


def save(checkpoints: Checkpointer, *steps: int) -> Path:
    """Save steps that hold their own number; the last one's folder."""
    for step in steps:
        folder = checkpoints.save(step, x(step), {})
    return folder


def assert_holds(directory: Path, step: int) -> None:
    wanted = x(-1)
    assert Checkpointer(directory, ALONE).load(wanted).step == step
    assert torch.equal(wanted["x"], x(step)["x"])
    assert list(committed_steps(directory)) == [step]


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def modes_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode for path in folder.iterdir()} | {"": folder.stat().st_mode}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpoints(directory: Path) -> Checkpointer:
    return Checkpointer(directory, ALONE, keep_last=1)


def moved_out(folder: Path) -> Path:
    """Move a checkpoint to an archive and leave a link to it."""
    archive = folder.parents[1] / "archive"
    archive.mkdir()
    kept = Path(shutil.move(folder, archive))
    folder.symlink_to(kept)
    return kept


def test_of_a_checkpoint_that_is_a_link_to_an_archive_only_the_link_goes(checkpoints, directory, capsys):
    archive = moved_out(save(checkpoints, 1))
    before = files_in(archive)
    save(checkpoints, 2, 3)
    assert await_deletions(30)
    assert files_in(archive) == before
    assert not any(path.is_symlink() for path in directory.iterdir())
    assert_holds(directory, 3)
    assert capsys.readouterr().err == ""


def test_a_link_to_an_archive_that_is_replaced_goes_alone(checkpoints, directory, capsys):
    archive = moved_out(save(checkpoints, 1))
    before = files_in(archive)
    save(Checkpointer(directory, ALONE), 1)
    assert await_deletions(30)
    assert files_in(archive) == before
    assert [path.name for path in directory.glob("step-*")] == ["step-00000001"]
    assert not (directory / "step-00000001").is_symlink()
    assert capsys.readouterr().err == ""


def test_a_folder_that_somebody_made_in_an_old_checkpoint_fails_no_save(checkpoints, directory):
    results = save(checkpoints, 1) / "eval"
    results.mkdir()
    (results / "result.txt").write_text("a")
    folder = save(checkpoints, 2, 3)
    assert not (folder / "eval").exists()
    assert_holds(directory, 3)


def test_a_shard_that_is_a_link_is_not_written_through(checkpoints, directory, tmp_path):
    shard, kept = save(checkpoints, 1) / SHARD, tmp_path / "kept.h5"
    before = shard.read_bytes()
    shard.rename(kept)
    shard.symlink_to(kept)
    folder = save(checkpoints, 2, 3)
    assert kept.read_bytes() == before
    assert not (folder / SHARD).is_symlink()
    assert_holds(directory, 3)


def test_modes_that_were_opened_up_are_not_inherited(checkpoints, directory):
    old = save(checkpoints, 1)
    before = modes_in(old)
    for path in (old, *old.iterdir()):
        path.chmod(0o777)
    assert modes_in(save(checkpoints, 2, 3)) == before
    assert_holds(directory, 3)


def save_while_a_backup_links(folder: Path, world: World) -> list[bool]:
    """Save a node's file of which a hard link is made between the writing of rank 0 and that of rank 1."""
    import toolkit.checkpoint.saving.node_file as node_file

    write_own = node_file._write_own

    def late(path: Path, *given):
        if world.rank == 1:
            time.sleep(0.3)
            os.link(path, folder / "snapshot")
        return write_own(path, *given)

    node_file._write_own = late
    try:
        checkpoints = Checkpointer(folder / "checkpoints", world, aggregate="node")
        whole = torch.arange(float(ROWS))
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (world.size,)), [Shard(0)])
        saved = checkpoints.save(1, {"t": sharded}, {})
    finally:
        node_file._write_own = write_own
    wanted = {"t": torch.zeros(ROWS)}
    checkpoints.load(wanted)
    return [torch.equal(wanted["t"], whole), verify_fully(saved)[1] == []]


def test_a_hard_link_made_while_a_node_writes_its_file_loses_nothing(tmp_path):
    assert run_ranks(2, save_while_a_backup_links, tmp_path) == [[True, True], [True, True]]

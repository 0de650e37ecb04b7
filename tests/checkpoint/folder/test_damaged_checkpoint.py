"""Every kind of damage is found, named, and never loaded."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from toolkit.checkpoint import Checkpointer, HDF5StorageReader, HDF5StorageWriter
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.folder.commit import open_part
from toolkit.checkpoint.folder.deletion import await_deletions
from toolkit.checkpoint.folder.verify import verify_fully, verify_quickly
from toolkit.checkpoint.format.digests import BLOCK_BYTES
from toolkit.checkpoint.format.layout import step_folder
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import ToolkitError
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.layout import RunDirectory
from toolkit.world.facts import World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")
SHARD = "shard-00000-of-00001.h5"
NAMES = ["first", "second", "third"]


def tensors(fill: float) -> dict[str, torch.Tensor]:
    """Three tensors of one and a half blocks each, and a small one."""
    return {**{name: torch.full((6, 1 << 18), fill) for name in NAMES}, "small": torch.tensor(fill)}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return Checkpointer(tmp_path_factory.mktemp("damage"), ALONE).save(1, tensors(1.0), {"loss": 0.5})


class Flipped:
    """A file with one bit flipped, for as long as the `with` lasts."""

    def __init__(self, path: Path, bit: int) -> None:
        self.path, self.bit = path, bit

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *_: object) -> None:
        self._flip()

    def _flip(self) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.bit // 8)
            byte = file.read(1)[0]
            file.seek(self.bit // 8)
            file.write(bytes([byte ^ (1 << self.bit % 8)]))


def blocks_of(path: Path) -> range:
    return range(-(-path.stat().st_size // BLOCK_BYTES))


def test_a_flipped_bit_in_any_block_is_found_with_its_tensors(good):
    shard = good / SHARD
    manifest = read_manifest(good)
    choose = random.Random(0)
    for block in blocks_of(shard):
        end = min((block + 1) * BLOCK_BYTES, shard.stat().st_size)
        byte = choose.randrange(block * BLOCK_BYTES, end)
        hit = {
            name
            for name, record in manifest.tensors.items()
            for piece in record.pieces
            if piece.byte_offset <= byte < piece.byte_offset + record.size_bytes
        }
        with Flipped(shard, byte * 8 + choose.randrange(8)):
            (problem,) = verify_fully(good)[1]
            assert (problem.file, problem.block) == (SHARD, block)
            assert hit <= set(problem.tensors)
            with pytest.raises(dcp.CheckpointException, match=f"block {block} "):
                dcp.load(tensors(0.0), storage_reader=HDF5StorageReader(good))
    assert not verify_fully(good)[1]


def test_only_the_touched_blocks_are_read(good):
    """A load of one tensor does not mind damage in another."""
    third = read_manifest(good).tensors["third"].pieces[0]
    with Flipped(good / SHARD, (third.byte_offset + 5 * BLOCK_BYTES // 4) * 8):
        wanted = {"first": torch.zeros(6, 1 << 18)}
        dcp.load(wanted, storage_reader=HDF5StorageReader(good))
        assert torch.equal(wanted["first"], tensors(1.0)["first"])


def test_nothing_good_is_an_error_until_the_user_removes_it(tmp_path):
    checkpoints = Checkpointer(tmp_path, ALONE)
    assert checkpoints.load({"x": torch.zeros(1)}) is None
    (checkpoints.save(1, {"x": torch.zeros(1)}, {}) / SHARD).unlink()
    for attempt in (0, 1):  # the supervisor's next attempt must not start from zero either
        with pytest.raises(CorruptCheckpointError, match=r"damaged: step-00000001\.bad-0") as caught:
            Checkpointer(tmp_path, replace(ALONE, attempt=attempt)).load({"x": torch.zeros(1)})
    assert "start from step 0" in caught.value.fix
    assert checkpoints.latest() is None
    shutil.rmtree(tmp_path / "step-00000001.bad-0")
    assert checkpoints.load({"x": torch.zeros(1)}) is None


def test_a_host_that_cannot_open_files_leaves_the_checkpoints_alone(tmp_path, monkeypatch):
    checkpoints = Checkpointer(tmp_path, ALONE)
    folder = checkpoints.save(1, {"x": torch.ones(4)}, {})

    def too_many_files(path: object, *_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patch, pytest.raises(ToolkitError) as caught:
        patch.setattr("toolkit.checkpoint.loading.shard_reader.os.open", too_many_files)
        checkpoints.load({"x": torch.zeros(4)})
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert f"cannot be read on {socket.gethostname()}: EMFILE" in str(caught.value)
    assert list(tmp_path.glob("step-*")) == [folder]
    assert checkpoints.load({"x": torch.zeros(4)}).step == 1


def test_a_load_that_found_damage_halfway_leaves_what_need_not_be_there(tmp_path):
    """The damage lies in what is read last; the older checkpoint, which is loaded instead, lacks one tensor."""
    checkpoints = Checkpointer(tmp_path, ALONE)
    checkpoints.save(1, {"last": torch.ones(3_000_000)}, {})
    folder = checkpoints.save(2, {"first": torch.ones(4), "last": torch.full((3_000_000,), 2.0)}, {})
    record = read_manifest(folder).tensors["last"]
    wanted = {"first": torch.full((4,), 7.0), "last": torch.zeros(3_000_000)}
    with Flipped(folder / SHARD, (record.pieces[0].byte_offset + record.size_bytes - 1) * 8):
        loaded = checkpoints.load(wanted, optional=["first"])
        assert (loaded.step, loaded.missing) == (1, ("first",))
        assert wanted["first"].tolist() == [7, 7, 7, 7] and (wanted["last"] == 1).all()
        (tmp_path / "step-00000002.bad-0").rename(folder)


def test_a_part_is_never_loaded_however_complete(tmp_path):
    old = Checkpointer(tmp_path, ALONE)
    folder = old.save(1, {"x": torch.ones(4)}, {})
    folder.rename(tmp_path / "step-00000001.part-0-1")
    assert old.load({"x": torch.zeros(4)}) is None
    Checkpointer(tmp_path, replace(ALONE, attempt=1))
    assert await_deletions(30)
    assert list(tmp_path.glob("step-*")) == []


def test_parts_that_a_claim_fenced_off_are_removed_at_the_next_start(tmp_path):
    run = RunDirectory(tmp_path)
    for folder in (run.attempts, run.checkpoints):
        folder.mkdir()
    old = claim_attempt(run)
    final = step_folder(run.checkpoints, 7)
    shutil.copytree(open_part(final, old.number, 1), final.with_name("step-00000007.stale-0"))
    new = claim_attempt(run)
    assert len(list(run.checkpoints.glob("*.stale-0*"))) == 2
    Checkpointer(run.checkpoints, replace(ALONE, attempt=new.number))
    assert await_deletions(30)
    assert list(run.checkpoints.glob("step-*")) == []


@pytest.mark.parametrize("moment", ["finish_plan", "resolve_data"])
def test_an_attempt_that_was_given_up_on_cannot_commit_late(tmp_path, moment):
    """The next attempt begins while ranks of the old one, thought dead, are in the middle of a save."""

    class Overtaken(dcp.DefaultSavePlanner):
        pass

    def overtaken(self, argument):
        Checkpointer(tmp_path, replace(ALONE, attempt=1))
        return getattr(dcp.DefaultSavePlanner, moment)(self, argument)

    setattr(Overtaken, moment, overtaken)
    writer = HDF5StorageWriter(tmp_path / "step-00000001", attempt=0)
    with pytest.raises(dcp.CheckpointException):
        dcp.save({"x": torch.ones(4)}, storage_writer=writer, planner=Overtaken())
    assert await_deletions(30)
    assert list(tmp_path.glob("step-*")) == []


def test_a_checkpoint_of_another_version_is_refused_and_not_moved(tmp_path):
    folder = Checkpointer(tmp_path, ALONE).save(1, {"x": torch.ones(4)}, {})
    resign(folder / "manifest.json", '"schema": 1', '"schema": 4')
    with pytest.raises(ToolkitError, match="newer"):
        Checkpointer(tmp_path, ALONE).load({"x": torch.zeros(4)})
    assert folder.is_dir()


def resign(path: Path, old: str, new: str) -> None:
    """Change a manifest and give it the digest that its page in the docs describes."""
    import json

    import xxhash

    text = path.read_text()
    digest = json.loads(text)["digest"]
    unsigned = text.replace(old, new).replace(digest, "0" * 32)
    path.write_text(unsigned.replace("0" * 32, xxhash.xxh3_128_hexdigest(unsigned.encode())))


def test_the_index_is_readable_with_plain_h5py_and_shows_a_missing_file_as_nan(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5, 3, generator=generator).bfloat16()
    folder = Checkpointer(tmp_path, ALONE).save(1, {"a/b": weights, "n": torch.arange(3)}, {})
    with h5py.File(folder / "index.h5") as file:
        assert file["tensors/a%2Fb"].dtype == np.float32
        assert np.array_equal(file["tensors/a%2Fb"][:], weights.float().numpy())
    (folder / SHARD).rename(folder / "gone")
    with h5py.File(folder / "index.h5") as file:
        assert np.isnan(file["tensors/a%2Fb"][:]).all()
        assert not file["tensors/n"][:].any()


def test_the_loss_of_the_index_harms_nothing(tmp_path):
    folder = Checkpointer(tmp_path, ALONE).save(1, {"x": torch.ones(4)}, {})
    (folder / "index.h5").unlink()
    assert not verify_fully(folder)[1]
    assert Checkpointer(tmp_path, ALONE).load({"x": torch.zeros(4)}).step == 1


def test_a_link_in_place_of_a_file_is_not_followed(good, tmp_path):
    """Whoever may write into the folder must not make a load read what only the loading user may."""
    for name in (SHARD, "shard-00000-of-00001.digest"):
        folder = tmp_path / name / good.name
        shutil.copytree(good, folder)
        (folder / name).rename(tmp_path / name / "elsewhere")
        (folder / name).symlink_to(tmp_path / name / "elsewhere")
        _, problems = verify_quickly(folder)
        assert [str(problem) for problem in problems] == [f"{name}: is not a regular file"]
        with pytest.raises(CorruptCheckpointError, match="is not a regular file"):
            Checkpointer(folder.parent, ALONE).load(tensors(0.0), source=folder)

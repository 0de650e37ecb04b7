"""Who may read a checkpoint, and when its bytes are on the disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from toolkit.checkpoint import Checkpointer, HDF5StorageWriter
from toolkit.checkpoint.format.index import write_index
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.layout import create_run
from toolkit.world.facts import World

HERE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt=0)
FILES = {"manifest.json", "index.h5", "shard-00000-of-00001.h5", "shard-00000-of-00001.digest"}


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> set[int]:
    assert {path.name for path in folder.iterdir()} == FILES
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize(("access", "folder_mode", "file_mode"), [("user", 0o700, 0o600), ("group", 0o750, 0o640)])
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("folder_is_there", [True, False])
def test_access_says_who_reads_a_checkpoint(tmp_path, access, folder_mode, file_mode, mask, folder_is_there):
    with umask(mask):
        run = create_run(tmp_path, "job", access=access)
        claim_attempt(run)
        if not folder_is_there:
            run.checkpoints.rmdir()
        folder = Checkpointer(run.checkpoints, HERE).save(1, {"x": torch.ones(3)}, {})
        assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)} == {folder_mode}
        assert modes(folder) == {file_mode}
        (folder / "index.h5").unlink()
        write_index(folder, read_manifest(folder))
        assert modes(folder) == {file_mode}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_outside_a_run_the_umask_rules(tmp_path, mask):
    tmp_path.chmod(0o777)  # not what the new folders take after
    with umask(mask):
        dcp.save({"x": torch.ones(3)}, storage_writer=HDF5StorageWriter(tmp_path / "deep" / "x"))
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("deep", "deep/x")} == {0o777 & ~mask}
    assert modes(tmp_path / "deep" / "x") == {0o666 & ~mask}


def test_all_files_are_on_the_disk_before_the_commit(tmp_path, monkeypatch):
    synced: list[Path] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    Checkpointer(tmp_path, HERE).save(1, {"x": torch.ones(3)}, {})
    part, files = synced[-2], synced[:-2]
    assert part.name.startswith("step-00000001.part-0-") and synced[-1] == tmp_path
    assert {path.parent for path in files} == {part}
    # A file that is written under another name first was synced under that one: `.manifest.json.123.tmp`.
    assert {path.name.removeprefix(".").removesuffix(f".{os.getpid()}.tmp") for path in files} == FILES

"""NFS and Lustre may lock nothing, or let one wait for ever: no save, load or look asks for a lock."""

from __future__ import annotations

import fcntl
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from ckpt_runs import ALONE, typed

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.index import write_index
from toolkit.checkpoint.format.manifest_file import read_manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def value(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((5000, 3), float(step))}


def lock(locks: ExitStack, folder: Path) -> None:
    """Hold all files of a checkpoint, as somebody may for ever."""
    for path in folder.iterdir():
        file = locks.enter_context(path.open("rb"))
        with suppress(BlockingIOError):  # one that serves again is locked already
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_nobody_waits_for_a_locked_file(tmp_path: Path, compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "TRUE")  # as a user's environment may say, against h5py's `locking`
    checkpoints = Checkpointer(tmp_path, ALONE, keep_last=1, compression=compression)
    with ExitStack() as locks:
        for step in (1, 2, 3, 4):  # from the third on over the files of one before, which are locked
            folder = checkpoints.save(step, value(step), {})
            lock(locks, folder)
        wanted = value(0)
        assert Checkpointer(tmp_path, ALONE).load(wanted).step == 4
        assert torch.equal(wanted["x"], value(4)["x"])
        assert verify_fully(folder)[1] == []
        write_index(folder, read_manifest(folder))
        for words in (("verify", "--full", folder), ("show", "--norms", folder), ("index", folder)):
            assert typed(*words).returncode == 0, words

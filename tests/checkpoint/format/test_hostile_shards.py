"""Shard files that somebody wrote on purpose, with digests and a manifest that fit: loads read nothing outside of them,
and a full verify tells that other tools would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from forged import SHARD, sign
from h5py import h5d, h5s, h5t

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.world.facts import World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")
PLACE = "/tensors/weight/0"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Checkpointer(tmp_path / "run", ALONE).save(1, {"weight": torch.ones(4096)}, {})


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the loading user's, in the same form."""
    path = tmp_path / "secret.h5"
    with h5py.File(path, "w") as file:
        file[PLACE] = np.full(4096, 7.0, "f4")
    return path


def link_the_dataset(file: h5py.File, secret: Path) -> None:
    del file[PLACE]
    file[PLACE] = h5py.ExternalLink(str(secret), PLACE)


def link_the_group(file: h5py.File, secret: Path) -> None:
    del file["/tensors"]
    file["/tensors"] = h5py.ExternalLink(str(secret), "/tensors")


def link_inside(file: h5py.File, secret: Path) -> None:
    file.move(PLACE, "/elsewhere")
    file[PLACE] = h5py.SoftLink("/elsewhere")


def make_virtual(file: h5py.File, secret: Path) -> None:
    del file[PLACE]
    layout = h5py.VirtualLayout((4096,), "f4")
    layout[:] = h5py.VirtualSource(str(secret), PLACE, (4096,), "f4")
    file.create_virtual_dataset(PLACE, layout)


def store_externally(file: h5py.File, secret: Path) -> None:
    del file[PLACE]
    file.create_dataset(PLACE, (4096,), "f4", external=[(str(secret), 0, 16384)])


def put_a_group_there(file: h5py.File, secret: Path) -> None:
    del file[PLACE]
    file.create_group(PLACE)


def put_a_dataset_in_the_way(file: h5py.File, secret: Path) -> None:
    del file["/tensors"]
    file["/tensors"] = 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (link_the_dataset, "finds no hard link 0 for this tensor"),
        (link_the_group, "finds no hard link tensors for this tensor"),
        (link_inside, "finds no hard link 0 for this tensor"),
        (make_virtual, "from other bytes than the manifest states"),
        (store_externally, "from other bytes than the manifest states"),
        (put_a_group_there, "contains no HDF5 dataset"),
        (put_a_dataset_in_the_way, "finds no hard link weight for this tensor"),
    ],
)
def test_data_that_lie_elsewhere_are_never_read_and_told(
    saved: Path, secret: Path, change: Callable[[h5py.File, Path], None], said: str
) -> None:
    manifest = read_manifest(saved)
    with h5py.File(saved / SHARD, "r+") as file:
        change(file, secret)
    with (saved / SHARD).open("ab") as file:
        file.write(b"\0" * 65536)  # a file that became shorter would be refused for that
    sign(saved, manifest)
    (piece,) = manifest.tensors["weight"].pieces
    there = np.fromfile(saved / SHARD, "<f4", 4096, offset=piece.byte_offset)
    target = {"weight": torch.zeros(4096)}
    Checkpointer(saved.parent, ALONE).load(target, source=saved)
    assert target["weight"].numpy().tobytes() == there.tobytes()
    assert not (target["weight"] == 7).any()
    (problem,) = verify_fully(saved)[1]
    assert problem.tensors == ("weight",) and said in problem.what


def test_data_of_another_type_are_told(saved: Path) -> None:
    """HDF5 would convert integers to floats without a word."""
    manifest = read_manifest(saved)
    with h5py.File(saved / SHARD, "r+") as file:
        properties, group = file[PLACE].id.get_create_plist(), file[PLACE].parent
        file.move(PLACE, "/elsewhere")
        made = h5d.create(group.id, b"0", h5t.STD_I32LE, h5s.create_simple((4096,)), properties)
        made.write(h5s.ALL, h5s.ALL, np.ones(4096, "i4"))
        byte_offset = made.get_offset()
    record = manifest.tensors["weight"]
    pieces = (record.pieces[0]._replace(byte_offset=byte_offset),)
    sign(saved, replace(manifest, tensors={"weight": replace(record, pieces=pieces)}))
    (problem,) = verify_fully(saved)[1]
    assert "as another type" in problem.what


def test_a_shard_file_that_is_a_link_is_refused(saved: Path, tmp_path: Path) -> None:
    (saved / SHARD).rename(tmp_path / "elsewhere.h5")
    (saved / SHARD).symlink_to(tmp_path / "elsewhere.h5")
    with pytest.raises(CorruptCheckpointError, match="is not a regular file"):
        Checkpointer(saved.parent, ALONE).load({"weight": torch.zeros(4096)}, source=saved)

"""A checkpoint that an older version wrote is read as ever."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from ckpt_runs import ALONE, typed

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.verify import verify_fully

OLD = Path(__file__).parent / "data" / "schema-1" / "step-00000007"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(OLD, tmp_path / OLD.name)


def test_it_loads_bit_by_bit(folder: Path) -> None:
    wanted = {
        "model": {"weight": torch.zeros(5, 7), "a/b": torch.zeros(6, dtype=torch.bfloat16)},
        "random": {f"rank-{rank:05d}": torch.zeros(5, dtype=torch.uint8) for rank in range(2)},
        "flag": torch.zeros(2, dtype=torch.bool),
        "z": torch.zeros(1, dtype=torch.complex64),
        "lr": None,
        "betas": None,
    }
    loaded = Checkpointer(folder.parent, ALONE).load(wanted)
    assert loaded is not None
    assert (loaded.step, loaded.world_size, loaded.state) == (7, 2, {"step": 7, "epoch": 1})
    assert torch.equal(wanted["model"]["weight"], torch.arange(35.0).reshape(5, 7))
    assert torch.equal(wanted["model"]["a/b"], torch.arange(6).bfloat16())
    assert [wanted["random"][f"rank-{rank:05d}"].tolist() for rank in range(2)] == [[0] * 5, [1] * 5]
    assert (wanted["lr"], wanted["betas"]) == (0.5, (0.9, float("inf")))
    assert (wanted["flag"].tolist(), wanted["z"].tolist()) == ([True, False], [1 + 2j])


def test_it_verifies_and_shows(folder: Path) -> None:
    manifest, problems = verify_fully(folder)
    assert manifest is not None and problems == []
    assert typed("verify", "--full", folder).returncode == 0
    shown = typed("show", "--norms", folder)
    assert shown.returncode == 0 and "bfloat16" in shown.stdout and "a/b" in shown.stdout

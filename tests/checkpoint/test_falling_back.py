"""What a load and a save do where the newest checkpoint is not what they took it for, and nobody may be in their way."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from ckpt_runs import ALONE, SHARD, flip

from toolkit.checkpoint import Checkpointer, checkpointer
from toolkit.checkpoint.folder.writer_lock import WRITER, Writer
from toolkit.checkpoint.loading import falling_back, one_checkpoint
from toolkit.errors import ToolkitError
from toolkit.rundir.claims import process_start_ticks
from toolkit.rundir.files import utc_now


def x(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((3000,), float(value))}


def save(directory: Path, *steps: int) -> Path:
    checkpoints = Checkpointer(directory, ALONE)
    for step in steps:
        folder = checkpoints.save(step, x(step), {})
    return folder


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step-*"))


def test_a_step_that_was_saved_before_an_older_one_was_loaded_is_saved_anew(tmp_path):
    checkpoints = Checkpointer(tmp_path, ALONE, keep_last=5)
    checkpoints.save(5, x(5), {})
    checkpoints.save(10, x(10), {})
    tensors = x(0)
    checkpoints.load(tensors, source=tmp_path / "step-00000005")
    tensors["x"] += 100
    checkpoints.save(10, tensors, {})
    stored = x(0)
    assert Checkpointer(tmp_path, ALONE).load(stored).step == 10
    assert torch.equal(stored["x"], x(105)["x"])


def meanwhile(monkeypatch: pytest.MonkeyPatch, name: str, happens) -> None:
    """Something happens once, just before a load calls a function."""
    module = falling_back if name == "verify_quickly" else one_checkpoint
    function, once = getattr(module, name), [happens]

    def late(*given, **named):
        if once:
            once.pop()()
        return function(*given, **named)

    monkeypatch.setattr(module, name, late)


@pytest.mark.parametrize("before", ["verify_quickly", "planned_load", "share_of_checks"])
def test_a_reader_whose_checkpoint_is_retained_away_loads_the_newer_one(tmp_path, monkeypatch, capsys, before):
    writer = Checkpointer(tmp_path, ALONE, keep_last=1)
    writer.save(1, x(1), {})
    reader, tensors = Checkpointer(tmp_path, ALONE), x(0)
    meanwhile(monkeypatch, before, lambda: writer.save(2, x(2), {}))
    assert reader.load(tensors).step == 2
    assert torch.equal(tensors["x"], x(2)["x"])
    assert not any(".bad-" in name for name in names_in(tmp_path))
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.parametrize("before", ["verify_quickly", "planned_load", "share_of_checks"])
def test_a_reader_whose_only_checkpoint_is_removed_begins(tmp_path, monkeypatch, before):
    folder = save(tmp_path, 1)
    reader = Checkpointer(tmp_path, ALONE)
    meanwhile(monkeypatch, before, lambda: shutil.rmtree(folder))
    assert reader.load(x(0)) is None
    assert names_in(tmp_path) == []


@pytest.fixture
def writer_lives() -> Iterator[Writer]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield Writer(socket.gethostname(), process.pid, process_start_ticks(process.pid), 0, utc_now())
        process.kill()


def write_from_now_on(directory: Path, writer: Writer) -> None:
    (directory / WRITER).write_text(json.dumps(asdict(writer)))


def test_a_checkpoint_that_another_process_retained_away_is_not_called_damaged(
    tmp_path, writer_lives, monkeypatch, capsys
):
    writer = Checkpointer(tmp_path, ALONE, keep_last=1)
    writer.save(1, x(1), {})
    reader = Checkpointer(tmp_path, ALONE)

    def retained_away() -> None:
        writer.save(2, x(2), {})
        write_from_now_on(tmp_path, writer_lives)

    meanwhile(monkeypatch, "planned_load", retained_away)
    assert reader.load(x(0)).step == 2
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.parametrize("is_quick", [True, False])
def test_a_reader_renames_nothing_while_another_process_writes_there(tmp_path, writer_lives, capsys, is_quick):
    folder = save(tmp_path, 1, 2)
    damaged = folder / ("manifest.json" if is_quick else SHARD)
    flip(damaged, damaged.stat().st_size // 2)
    write_from_now_on(tmp_path, writer_lives)
    tensors = x(0)
    assert Checkpointer(tmp_path, ALONE).load(tensors).step == 1
    assert torch.equal(tensors["x"], x(1)["x"])
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]
    said = capsys.readouterr().err
    assert "step-00000002 is damaged" in said and "was moved" not in said and said.count("\n") == 1


def test_a_reader_that_may_rename_nothing_does_not_begin_beside_damage(tmp_path, writer_lives):
    flip(save(tmp_path, 1) / SHARD, -5)
    write_from_now_on(tmp_path, writer_lives)
    with pytest.raises(ToolkitError, match="damaged"):
        Checkpointer(tmp_path, ALONE).load(x(0))
    assert names_in(tmp_path) == ["step-00000001"]


class FullDisk(io.TextIOBase):
    """A stderr that goes to a file, on a disk that has no room."""

    def write(self, _text: str) -> int:
        raise OSError(28, "No space left on device")

    flush = write


def test_a_full_stderr_fails_no_save(tmp_path, monkeypatch):
    save(tmp_path, 10)
    again = Checkpointer(tmp_path, ALONE)
    monkeypatch.setattr(sys, "stderr", FullDisk())
    again.save(5, x(5), {})
    assert names_in(tmp_path) == ["step-00000005", "step-00000010.left-0"]


def test_a_full_stderr_fails_no_load(tmp_path, monkeypatch):
    flip(save(tmp_path, 1, 2) / SHARD, -5)
    monkeypatch.setattr(sys, "stderr", FullDisk())
    assert Checkpointer(tmp_path, ALONE).load(x(0)).step == 1
    assert names_in(tmp_path) == ["step-00000001", "step-00000002.bad-0"]


def test_a_full_stderr_fails_no_retention(tmp_path, monkeypatch):
    checkpoints = Checkpointer(tmp_path, ALONE, keep_last=1)
    checkpoints.save(1, x(1), {})

    def fail(*_given):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpointer, "retain", fail)
    monkeypatch.setattr(sys, "stderr", FullDisk())
    checkpoints.save(2, x(2), {})
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_file_and_a_dangling_link_under_the_name_of_a_step_stop_nobody(tmp_path):
    checkpoints = Checkpointer(tmp_path, ALONE)
    checkpoints.save(1, {"x": torch.ones(3)}, {})
    (tmp_path / "step-00000030").write_text("notes")
    (tmp_path / "step-00000040").symlink_to(tmp_path / "gone")
    loaded = Checkpointer(tmp_path, ALONE).load({"x": torch.zeros(3)})
    assert loaded is not None and loaded.step == 1

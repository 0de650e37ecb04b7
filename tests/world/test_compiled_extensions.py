"""The folder in which torch compiles extensions, and the locks there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.rundir.files import write_json
from toolkit.world import compiled_extensions

COMPILES = (
    "import sys; from torch.utils.file_baton import FileBaton as B; B(sys.argv[1]).try_acquire(); print('compiles'); "
)


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    """The site's local scratch."""
    monkeypatch.setattr(
        compiled_extensions, "version", lambda package: {"torch": "2.13.0", "deepspeed": "0.19.8"}[package]
    )
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    write_json(tmp_path / "job.json", {"paths": {"local_scratch": "$NODE_DISK"}})
    monkeypatch.setenv("TOOLKIT_RESOLVED_JOB", str(tmp_path / "job.json"))
    yield tmp_path / "disk"
    os.environ.pop("TORCH_EXTENSIONS_DIR", None)


def compiling(lock: Path, then: str) -> subprocess.Popen[str]:
    """A process that has created the lock as torch does when it compiles."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([sys.executable, "-c", COMPILES + then, str(lock)], stdin=-1, stdout=-1, text=True)
    process.stdout.readline()
    return process


def test_the_folder_is_local_and_of_these_versions(scratch) -> None:
    folder = compiled_extensions.prepare_extensions("deepspeed")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert folder == scratch / f"toolkit-extensions-{os.getuid()}" / f"torch2.13.0-deepspeed0.19.8-{python}"
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder) and folder.is_dir()
    assert folder.parent.stat().st_mode & 0o777 == 0o700


def test_the_lock_of_a_dead_process_is_removed_and_a_living_one_is_waited_for(scratch, capsys, monkeypatch) -> None:
    folder = compiled_extensions.prepare_extensions("deepspeed")
    dead, living = folder / "fused_adam/lock", folder / "cpu_adam/lock"
    compiling(dead, "import os; sys.stdout.flush(); os.kill(os.getpid(), 9)").wait()
    process = compiling(living, "sys.stdout.flush(); sys.stdin.read()")
    seen = []

    def pause(_seconds: float) -> None:
        seen.append((dead.exists(), living.exists()))
        if len(seen) == 2:
            process.kill()
            process.wait()

    monkeypatch.setattr(compiled_extensions.time, "sleep", pause)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    compiled_extensions.prepare_extensions("deepspeed")
    assert seen == [(False, True), (False, True)] and not living.exists()
    said = capsys.readouterr().err
    assert f"removed {dead}, which" in said and f"removed {living}, which" in said
    assert said.count(f"waiting for a process that compiles: {living}") == 1


def test_a_folder_that_the_user_names_remains_as_it_is(scratch, monkeypatch, tmp_path) -> None:
    lock = tmp_path / "mine/fused_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "mine"))
    assert compiled_extensions.prepare_extensions("deepspeed") == tmp_path / "mine"
    assert lock.exists() and not scratch.exists()


def test_a_folder_into_which_others_can_write_is_refused(scratch) -> None:
    folder = scratch / f"toolkit-extensions-{os.getuid()}"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(ToolkitError, match="other users can write"):
        compiled_extensions.prepare_extensions("deepspeed")

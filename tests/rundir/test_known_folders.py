"""The per-user index of folders of runs: what is recorded, skipped and forgotten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from toolkit.rundir import known_folders as module
from toolkit.rundir.known_folders import known_folders, record_folder

NOWHERE = Path("/nowhere/runs")


def test_folders_are_listed_once_and_without_the_present_one(tmp_path: Path, index_of_folders: Path) -> None:
    one, other, link = tmp_path / "b", tmp_path / "a", tmp_path / "link"
    for folder in (one, other):
        folder.mkdir()
    link.symlink_to(one)
    for folder in (one, other, one, link):
        record_folder(folder)
    assert len(list(index_of_folders.iterdir())) == 3
    assert sorted(folder.resolve() for folder in known_folders(NOWHERE)) == [other, one]
    assert known_folders(link) == [other]
    assert index_of_folders.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in index_of_folders.iterdir()} == {0o600}


def test_a_removed_folder_is_forgotten_but_not_an_unmounted_one(tmp_path: Path, index_of_folders: Path) -> None:
    project, scratch = tmp_path / "project", tmp_path / "scratch"
    for parent in (project, scratch):
        (parent / "runs").mkdir(parents=True)
        record_folder(parent / "runs")
    (project / "runs").rmdir()
    scratch.rename(tmp_path / "elsewhere")
    assert known_folders(NOWHERE) == []
    assert [json.loads(file.read_text())["path"] for file in index_of_folders.iterdir()] == [str(scratch / "runs")]
    scratch.mkdir()  # the empty mount point of another file system
    assert known_folders(NOWHERE) == [] and len(list(index_of_folders.iterdir())) == 1
    scratch.rmdir()
    (tmp_path / "elsewhere").rename(scratch)
    assert known_folders(NOWHERE) == [scratch / "runs"]


def test_a_damaged_file_is_removed_and_written_again(tmp_path: Path, index_of_folders: Path) -> None:
    record_folder(tmp_path)
    (file,) = index_of_folders.iterdir()
    for damage in ("", '{"path": 7, "parent_inode": "1"}', "[" * 10_000):
        file.write_text(damage)
        assert known_folders(NOWHERE) == [] and not file.exists()
        record_folder(tmp_path)
        assert known_folders(NOWHERE) == [tmp_path]


def test_an_unwritable_home_causes_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("TOOLKIT_INDEX")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))  # root may write to any folder, but not below a file
    record_folder(tmp_path)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and "Not a directory" in warnings[0] and f"--runs {tmp_path}" in warnings[0]
    assert known_folders(NOWHERE) == [] and capsys.readouterr().err == ""


def test_a_file_system_that_does_not_respond_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("dead", "usual"):
        (tmp_path / name).mkdir()
        record_folder(tmp_path / name)
    released = threading.Event()
    usual = module._identity
    monkeypatch.setattr(
        module, "_identity", lambda folder: (folder.name == "dead" and released.wait(20)) or usual(folder)
    )
    monkeypatch.setattr(module, "RESPONSE_S", 0.3)
    assert known_folders(NOWHERE) == [tmp_path / "usual"]
    assert f"skipping the runs in {tmp_path / 'dead'}" in capsys.readouterr().err
    released.set()


def test_concurrent_writers_leave_complete_files(tmp_path: Path, index_of_folders: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    program = (
        "import sys; from pathlib import Path; from toolkit.rundir.known_folders import known_folders, record_folder\n"
        "for number in range(300):\n"
        f"    record_folder(Path({str(tmp_path)!r}) / str(number % 3))\n"
        "    if number % 50 == 49:\n"
        "        for file in Path(sys.argv[1]).glob('known-*'): file.unlink(missing_ok=True)\n"
        "    known_folders(Path('/nowhere'))\n"
        "for number in range(3):\n"
        f"    record_folder(Path({str(tmp_path)!r}) / str(number))\n"
    )
    command = [sys.executable, "-c", program, str(index_of_folders)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, env=dict(os.environ)) for _ in range(3)]
    assert [(writer.communicate()[1], writer.returncode) for writer in writers] == [(b"", 0)] * 3
    assert known_folders(NOWHERE) == [tmp_path / str(number) for number in range(3)]
    assert not list(index_of_folders.glob(".*"))

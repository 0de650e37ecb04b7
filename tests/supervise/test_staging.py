"""Environments are packed once, known by what they hold, and refused where they could not be moved."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from toolkit.errors import OwnFailureError
from toolkit.rundir.claims import SupersededError
from toolkit.rundir.layout import RunDirectory
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.requests import StopRequest
from toolkit.supervise.staging import KEPT_S, LAST_S, Staged, digest_of, pack, stage, unstage, unstage_here
from toolkit.supervise.start import supervise
from toolkit.supervise.supervisor import Supervisor

IN_SLURM = Allocation("7", 1, True, True, 0.0, None, "node1")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    folder = tmp_path / "an env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


def job(stage: object, scratch: str = "/tmp") -> dict[str, Any]:
    return {"env": {"stage": stage}, "paths": {"local_scratch": scratch}}


def test_a_packed_environment_runs_elsewhere(venv: Path, tmp_path: Path) -> None:
    (module,) = venv.glob("lib/python*/site-packages")
    (module / "only_here.py").write_text("")
    archive = pack(venv, tmp_path / "cache", StopRequest())
    elsewhere = tmp_path / "elsewhere"
    with tarfile.open(archive) as stream:
        stream.extractall(elsewhere, filter="fully_trusted")
    (module / "only_here.py").unlink()
    argv = [elsewhere / "bin" / "python", "-P", "-c", "import only_here, sys; print(sys.prefix)"]
    assert subprocess.check_output(argv, text=True).strip() == str(elsewhere)


def test_the_archive_is_made_again_when_something_changed(venv: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = pack(venv, cache, StopRequest())
    made = first.stat().st_ino
    assert pack(venv, cache, StopRequest()).stat().st_ino == made
    (venv / "new").write_text("")
    second = pack(venv, cache, StopRequest())
    assert second != first and second.stem == digest_of(venv)
    assert sorted(cache.iterdir()) == sorted([first, second])
    (venv / "new").write_text("")  # of the same size, later
    assert pack(venv, cache, StopRequest()) not in (first, second)
    long_ago = time.time() - KEPT_S - 1
    os.utime(first, (long_ago, long_ago))
    (venv / "new").unlink()
    (venv / "newer").write_text("")
    pack(venv, cache, StopRequest())
    assert not first.exists() and second.exists()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (job("/usr"), "/usr is not a virtual environment: pyvenv.cfg not found"),
        (job(True, ""), "expected an absolute path of a local disk"),
        (job(True, "$NOT_SET_HERE/x"), "expected an absolute path of a local disk"),
    ],
)
def test_what_cannot_be_staged_is_refused(
    run_directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, venv: Path, table: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(sys, "prefix", str(venv))
    with pytest.raises(OwnFailureError, match=words) as error:
        stage(run_directory, table, IN_SLURM, {"PATH": "/none"}, StopRequest())
    assert error.value.where == "env.stage" and "remove env.stage" in error.value.fix


SRUN = 'while case "$1" in --*) ;; *) false; esac; do shift; done; exec "$@"'  # drops options


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The disk of one node; `srun` and `sbcast` are stand-ins that work on it."""
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.script("srun", SRUN)
    slurm.script("sbcast", 'exec cp "$2" "$3"')
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return scratch


def environ_of(node: Path) -> dict[str, str]:
    return {"PATH": f"{node.parent / 'bin'}:/usr/bin:/bin"}


def stage_to(node: Path, run: RunDirectory, venv: Path, **changes: Any) -> Staged:
    staged = stage(run, job(str(venv), str(node)), replace(IN_SLURM, **changes), environ_of(node), StopRequest())
    assert staged is not None
    return staged


def test_what_is_staged_runs_and_is_removed(run_directory: RunDirectory, venv: Path, node: Path) -> None:
    (venv / "open").mkdir()
    for folder in (venv, venv / "open"):
        folder.chmod(0o777)
    staged = stage_to(node, run_directory, venv)
    argv = [staged.python, "-c", "import sys; print(sys.prefix)"]
    assert subprocess.check_output(argv, text=True).strip() == str(staged.folder)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (staged.folder, staged.folder / "open")} == {0o700}
    assert not list(staged.folder.glob(".*.tar"))
    unstage(staged, IN_SLURM, environ_of(node))
    assert list(node.iterdir()) == []


def test_what_earlier_starts_of_the_job_left_goes_first(run_directory: RunDirectory, venv: Path, node: Path) -> None:
    first = stage_to(node, run_directory, venv)
    others = node / "toolkit-env-70-0-1234"  # of job 70
    others.mkdir()
    second = stage_to(node, run_directory, venv, restarts=1)
    assert second.folder != first.folder and sorted(node.iterdir()) == sorted([others, second.folder])
    unstage_here(second)
    assert list(node.iterdir()) == [others]


@pytest.mark.parametrize("kind", ["folder", "link", "dangling link"])
def test_a_folder_that_somebody_else_made_is_not_used(
    run_directory: RunDirectory, venv: Path, node: Path, tmp_path: Path, kind: str
) -> None:
    """Its name can be known before the job begins, and whoever owns it would own the ranks' Python."""
    if kind == "folder" and os.geteuid() != 0:
        pytest.skip("a folder of somebody else's needs root")
    name = stage_to(node, run_directory, venv).folder
    shutil.rmtree(name)
    theirs = tmp_path / "theirs"
    if kind == "folder":
        theirs = name
    if kind != "dangling link":
        theirs.mkdir(mode=0o777)
        theirs.chmod(0o777)
        (theirs / "kept").touch()
        os.chown(theirs, 65534 if kind == "folder" else -1, -1)
    if kind != "folder":
        name.symlink_to(theirs)
    with pytest.raises(
        OwnFailureError, match=f"environment to every node: {name} already exists, and belongs to another user"
    ):
        stage_to(node, run_directory, venv)
    assert os.path.lexists(name)
    assert [path.name for path in theirs.iterdir()] == ["kept"] if theirs.exists() else kind == "dangling link"


def test_a_disk_where_everybody_may_rename_is_refused(run_directory: RunDirectory, venv: Path, node: Path) -> None:
    node.chmod(0o777)
    with pytest.raises(OwnFailureError, match="is writable by everyone and has no sticky bit"):
        stage_to(node, run_directory, venv)
    node.chmod(0o1777)
    assert stage_to(node, run_directory, venv).folder.is_dir()


@pytest.mark.parametrize("failing", ["sbcast", "tar"])
def test_half_of_an_environment_does_not_stay(
    run_directory: RunDirectory, venv: Path, node: Path, failing: str
) -> None:
    half = {"sbcast": 'cp "$2" "$3"', "tar": '/bin/tar "$@"'}[failing]
    FakeSlurm(node.parent / "bin").script(failing, f"{half}; echo 'node1: No space left on device' >&2; exit 1")
    with pytest.raises(OwnFailureError) as error:
        stage_to(node, run_directory, venv)
    assert error.value.message == "cannot copy the environment to every node: node1: No space left on device"
    assert list(node.iterdir()) == []


@pytest.mark.parametrize(("left_s", "removed"), [(25.0, False), (34.0, True)])
def test_removal_leaves_time_for_the_requeue(
    run_directory: RunDirectory,
    venv: Path,
    node: Path,
    capsys: pytest.CaptureFixture[str],
    left_s: float,
    removed: bool,
) -> None:
    staged = stage_to(node, run_directory, venv)
    FakeSlurm(node.parent / "bin").script("srun", SRUN.replace("exec", "sleep 1; exec"))
    capsys.readouterr()
    unstage(staged, replace(IN_SLURM, ends_at=time.time() + left_s), environ_of(node))
    assert staged.folder.exists() is not removed
    assert ("was not removed from every node: only" in capsys.readouterr().out) is not removed


def test_a_removal_that_hangs_is_given_up_in_time(
    run_directory: RunDirectory, venv: Path, node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    staged = stage_to(node, run_directory, venv)
    FakeSlurm(node.parent / "bin").script("srun", "exec sleep 60")
    began = time.monotonic()
    unstage(staged, replace(IN_SLURM, ends_at=time.time() + LAST_S + 2), environ_of(node))
    assert time.monotonic() - began < 30
    assert "srun did not finish within 2 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "srun"), [(RuntimeError("unforeseen"), "srun"), (SupersededError("start 1 has this run now"), "gone")]
)
def test_a_start_that_cannot_go_on_removes_what_it_staged(
    run_directory: RunDirectory,
    local_job: Any,
    node: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    srun: str,
) -> None:
    """Where another start has the run, Slurm is asked for nothing, and this node alone is cleared."""
    (node.parent / "bin" / "srun").rename(node.parent / "bin" / srun)
    folder = node / "toolkit-env-7-0-1234"
    folder.mkdir()

    def live(supervisor: Supervisor) -> int:
        supervisor.staged = Staged(folder)
        raise error

    monkeypatch.setattr(Supervisor, "run_start", live)
    monkeypatch.setattr(StopRequest, "hear_signals", lambda _self: None)  # pytest keeps its own
    monkeypatch.setenv("PATH", environ_of(node)["PATH"])
    with pytest.raises(type(error)):
        supervise(run_directory, local_job(["true"]), first_start=0)
    assert list(node.iterdir()) == []

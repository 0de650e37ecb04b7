"""Environments are packed once, known by what they hold, and refused where they could not be moved."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import OwnFailureError
from toolkit.rundir.layout import RunDirectory
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.requests import StopRequest
from toolkit.supervise.staging import KEPT_S, digest_of, pack, stage

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
        (job("/usr"), "/usr is no virtual environment: it has no pyvenv.cfg"),
        (job(True, ""), "no disk of the nodes"),
        (job(True, "$NOT_SET_HERE/x"), "no disk of the nodes"),
    ],
)
def test_what_cannot_be_staged_is_refused(
    run_directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, venv: Path, table: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(sys, "prefix", str(venv))
    with pytest.raises(OwnFailureError, match=words) as error:
        stage(run_directory, table, IN_SLURM, {"PATH": "/none"}, StopRequest())
    assert error.value.where == "env.stage" and "leave env.stage out" in error.value.fix


def test_a_node_that_cannot_take_it_ends_the_start(run_directory: RunDirectory, venv: Path, tmp_path: Path) -> None:
    sbcast = tmp_path / "sbcast"
    sbcast.write_text("#!/bin/sh\necho 'sbcast: error: node1: No space left on device' >&2; exit 1\n")
    sbcast.chmod(0o755)
    with pytest.raises(OwnFailureError, match="did not reach every node: sbcast: error: node1: No space"):
        stage(run_directory, job(str(venv)), IN_SLURM, {"PATH": f"{tmp_path}:/usr/bin:/bin"}, StopRequest())

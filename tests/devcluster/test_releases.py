"""Which releases of Slurm there are, and that one is installed once. `tests/cluster/test_slurm_24_11.py` installs one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from toolkit.devcluster import releases
from toolkit.errors import OwnFailureError, ToolkitError


@pytest.fixture
def another_machine(tmp_path, monkeypatch):
    """A machine with Slurm 21.08, whose packages are empty; the list of its downloads."""
    downloads = []

    def download(version: str, suite: str, folder: Path) -> list[Path]:
        downloads.append(f"{version} {suite}")
        (folder / "root" / "bin").mkdir(parents=True)
        time.sleep(0.2)
        return []

    # nodes have their own /tmp, where pytest has its folders
    monkeypatch.setattr(releases, "require_shared", lambda folder, fix: None)
    monkeypatch.setattr(releases, "run_program", lambda argv: "slurm-wlm 21.08.8\n")
    monkeypatch.setattr(releases, "_download", download)
    monkeypatch.setattr(releases, "_unpack", lambda *argv: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return downloads


def test_an_installation_after_an_interrupted_one_runs_once(another_machine, tmp_path):
    interrupted = tmp_path / "toolkit" / "slurm-24.11.partial" / "root" / "half"
    interrupted.mkdir(parents=True)
    threads = [threading.Thread(target=releases.install, args=("24.11",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert another_machine == ["24.11 trixie"]
    assert [path.name for path in (tmp_path / "toolkit").iterdir()] == ["slurm-24.11"]
    assert [path.name for path in (tmp_path / "toolkit" / "slurm-24.11").iterdir()] == ["bin"]


def test_a_release_that_cannot_run_is_refused_with_the_others(another_machine):
    with pytest.raises(ToolkitError, match=r"got '21'") as unknown:
        releases.install("21")
    assert unknown.value.fix == "use one of 22.05, 24.11, 26.05"
    with pytest.raises(ToolkitError, match=r"22.05 runs only on Debian 12, but this machine has Slurm 21.08.8"):
        releases.install("22.05")
    assert releases.install("") == "" and another_machine == []


def test_a_suite_that_has_moved_on_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(releases, "run_program", lambda argv, env: None)
    archives = tmp_path / "cache" / "archives"
    archives.mkdir(parents=True)
    (archives / "slurmctld_26.11.0-1_amd64.deb").touch()
    with pytest.raises(OwnFailureError, match=r"expected Slurm 26.05 in Debian sid, got 26.11.0-1"):
        releases._download("26.05", "sid", tmp_path)


def test_a_cache_that_nodes_do_not_share_is_refused(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/cache")
    monkeypatch.setattr(releases, "run_program", lambda argv: "slurm-wlm 21.08.8\n")
    with pytest.raises(ToolkitError, match="each node has its own /tmp"):
        releases.install("24.11")

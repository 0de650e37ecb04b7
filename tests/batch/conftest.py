"""Small programs that stand for Slurm's commands, and a clock that only sleeping moves."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from projects import SAYS, git

from toolkit.batch import follow, logs


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Answer for squeue: `rows` are (id, state, reason); the calls are counted."""
    folder = tmp_path / "bin"
    folder.mkdir()
    answer, calls = folder / "answer.json", folder / "calls"
    calls.touch()
    program = f"""#!{sys.executable}
import json, re, sys
open({str(calls)!r}, "a").write(" ".join(sys.argv) + "\\n")
mark = re.search("--Format=JobArrayID:([^,]*),", " ".join(sys.argv))[1]
for job, state, reason in json.load(open({str(answer)!r})):
    print("".join(cell + mark for cell in (job, state, reason, "n1", "1:00", "N/A", "N/A", "0", *6 * ["(null)"], "N/A", job)))
"""
    (folder / "squeue").write_text(program)
    (folder / "sacct").write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    for command in ("squeue", "sacct"):
        (folder / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def say(*rows):
        answer.write_text(json.dumps(rows))
        return lambda: calls.read_text().splitlines()

    return say


@pytest.fixture
def sbatch(squeue, tmp_path):
    """Answer for sbatch: job 8, whatever is submitted."""
    for command, line in (("sbatch", "echo 8"), ("srun", "exit 1")):
        (tmp_path / "bin" / command).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / command).chmod(0o755)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only sleeping moves; `clock.at` are things to do once a time has come."""

    class Clock:
        def __init__(self):
            self.now, self.at = 0.0, []

        def sleep(self, seconds):
            self.now += seconds
            for time_s, action in [entry for entry in self.at if entry[0] <= self.now]:
                action()
                self.at.remove((time_s, action))

    clock = Clock()
    for module in (follow, logs):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep))
    return clock


@pytest.fixture
def project(toolkit) -> Path:
    """A job of one script with a module and a file of data beside it, in a folder that no repository has."""
    folder = toolkit.folder / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SAYS)
    (folder / "helper.py").write_text("WORD = 'as submitted'\n")
    (folder / "data.txt").write_text("data")
    (folder / "work.toml").write_text('[job]\nentry = "train.py"\n')
    return folder


@pytest.fixture
def repository(project: Path) -> Path:
    (project / ".gitignore").write_text("*.txt\ncache/\n")
    (project / "cache").mkdir()
    (project / "cache" / "big").write_text("big")
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    return project

"""Two processes that would save into one folder: the second is told who the first is, until that one has ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.writer_lock import WRITER, Writer, hold_folder
from toolkit.checkpoint.format.layout import committed_steps
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.claims import claim_attempt
from toolkit.world.facts import World

SCRIPT = """
import sys, torch
from pathlib import Path
from toolkit.checkpoint import Checkpointer
from toolkit.world.facts import World
world = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt=int(sys.argv[2]))
Checkpointer(Path(sys.argv[1]), world).save(1, {"x": torch.ones(3)}, {})
print("saved", flush=True)
sys.stdin.read()
"""


def alone(attempt: int) -> World:
    return World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt=attempt)


@contextmanager
def another(directory: Path, attempt: int = 0, script: str = SCRIPT) -> Iterator[subprocess.Popen[str]]:
    """A process that has saved step 1 and lives on."""
    argv = [sys.executable, "-c", script, directory, str(attempt)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "saved\n"
        yield process
        process.kill()


def save(directory: Path, step: int, attempt: int = 0) -> Path:
    return Checkpointer(directory, alone(attempt)).save(step, {"x": torch.full((3,), float(step))}, {})


def test_the_second_is_told_who_the_first_is(tmp_path):
    with another(tmp_path) as first:
        since = json.loads((tmp_path / WRITER).read_text())["since"]
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ToolkitError) as refused:
            save(tmp_path, 2)
        line = str(refused.value)
        assert f"process {first.pid} on {socket.gethostname()} (attempt 0) has saved here since {since}" in line
        assert (
            refused.value.fix
            == f"wait until that process exits, or choose another folder for this one; `kill {first.pid}` stops it"
        )
        assert "step 1 is the last good checkpoint" in line
        wanted = {"x": torch.zeros(3)}
        assert Checkpointer(tmp_path, alone(0)).load(wanted).step == 1  # who only reads, may
        assert sorted(tmp_path.iterdir()) == before
        first.send_signal(signal.SIGKILL)
        first.wait()
        save(tmp_path, 2)
    assert list(committed_steps(tmp_path)) == [1, 2]


@pytest.mark.evidence
def test_who_only_reads_disturbs_no_writer(tmp_path):
    """What a save has put aside for a moment looks like what a dead one left."""
    with another(tmp_path):
        (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.replaced-0")
        (tmp_path / "step-00000002.removed-0").mkdir()
        before = sorted(tmp_path.iterdir())
        Checkpointer(tmp_path, alone(0))
        assert sorted(tmp_path.iterdir()) == before


def test_a_process_that_ends_takes_its_name_away(tmp_path):
    with another(tmp_path) as first:
        first.communicate("")
        assert first.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    Checkpointer(tmp_path, alone(0)).load({"x": torch.zeros(3)})
    assert not (tmp_path / WRITER).exists()


def test_one_of_another_host_is_named_with_the_file_to_remove(tmp_path):
    (tmp_path / WRITER).write_text(
        '{"host": "elsewhere", "pid": 7, "process_started": 1, "attempt": 0, "since": "noon"}'
    )
    with pytest.raises(
        ToolkitError, match=r"process 7 on elsewhere \(attempt 0\) has saved here since noon"
    ) as refused:
        save(tmp_path, 1)
    assert refused.value.fix.endswith(f"if that process no longer runs, remove {tmp_path / WRITER}")
    (tmp_path / WRITER).unlink()
    save(tmp_path, 1)


def test_in_a_run_the_later_attempt_takes_the_folder(run_directory):
    claim_attempt(run_directory)
    with another(run_directory.checkpoints):
        claim_attempt(run_directory)
        save(run_directory.checkpoints, 2, attempt=1)
        with pytest.raises(OwnFailureError, match="attempt 0 was abandoned: attempt 1 owns the run now"):
            save(run_directory.checkpoints, 3, attempt=0)
    assert list(committed_steps(run_directory.checkpoints)) == [1, 2]


def test_a_pid_that_another_process_has_now_and_a_file_that_was_never_signed_hold_nobody_up(tmp_path):
    parent = os.getppid()
    for text in (json.dumps({**vars(Writer.here(0)), "pid": parent, "process_started": 1}), "", "{", "[]"):
        (tmp_path / WRITER).write_text(text)
        hold_folder(tmp_path, 0)
        assert json.loads((tmp_path / WRITER).read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == [WRITER]


@pytest.mark.evidence
def test_a_fork_that_ends_leaves_its_parents_name(tmp_path):
    fork = "import os\nif not (pid := os.fork()):\n    sys.exit(0)\nos.waitpid(pid, 0)\nprint("
    with another(tmp_path, script=SCRIPT.replace("print(", fork)), pytest.raises(ToolkitError, match="has saved here"):
        save(tmp_path, 2)


def test_processes_of_one_attempt_never_share_a_part(tmp_path):
    """However they came to think that the folder is theirs: each has a part folder of its own name."""
    ours = [Checkpointer(tmp_path, alone(0))._prepare(3, {"x": torch.ones(3)}, {}).description.part for _ in range(2)]
    assert ours[0] != ours[1] and not ours[0].exists() and ours[1].exists()

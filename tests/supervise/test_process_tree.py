"""Processes of a script are asked to exit so that those which save can: real shells and programs below a guard."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.supervise import proc
from toolkit.supervise.process_tree import end_descendants, running_below

SAVES = """
import signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
open(sys.argv[1] + ".ready", "w").close()
while not asked:
    time.sleep(0.05)
time.sleep(0.5)
print("saving", flush=True)  # fails if the reader of a pipe has exited
open(sys.argv[1] + f".saved{len(asked)}", "w").close()
"""
KILLS_ITS_CHILD = "trap 'touch launcher.termed; kill -9 $child' TERM; python save.py $1 & child=$!; wait; wait"
GUARD = """
import os, subprocess, sys, time
from pathlib import Path
from toolkit.supervise.parent_death import adopt_orphans
from toolkit.supervise.process_tree import ProcessTree
adopt_orphans()
shell = subprocess.Popen(sys.argv[2:])
while len([*Path().glob("*.ready")]) < int(sys.argv[1]):
    time.sleep(0.05)
time.sleep(0.3)
tree = ProcessTree(shell.pid)
tree.terminate()
os.waitid(os.P_PID, shell.pid, os.WEXITED | os.WNOWAIT)
tree.await_exit()
print("over", flush=True)
"""


@pytest.fixture
def stop(tmp_path, monkeypatch):
    """Run a bash script until `ready` programs of it handle signals, ask it to exit, and return the files that it left."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin")
    for name, body in (("save.py", SAVES), ("srun", f"#!/bin/bash\n{KILLS_ITS_CHILD}\n")):
        (tmp_path / name).write_text(body)
    (tmp_path / "srun").chmod(0o755)

    def run(body: str, ready: int = 1) -> set[str]:
        script = tmp_path / "job.sh"
        script.write_text(f"#!/bin/bash\n{body}\n")
        script.chmod(0o755)
        for path in tmp_path.glob("*.ready"):
            path.unlink()
        guard = [sys.executable, "-c", GUARD, str(ready), str(script)]
        done = subprocess.run(guard, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout.endswith("over\n"), done
        return {path.name for path in tmp_path.iterdir() if path.suffix.startswith((".saved", ".termed", ".next"))}

    return run


@pytest.mark.parametrize(
    "body",
    [
        "python save.py a",
        "python save.py a; touch b.next",  # a stopped script starts nothing further
        "bash -c 'bash -c \"python save.py a; true\"; true'",
        "python save.py a > a.log | sleep 60",
        "python save.py a | tee a.log",
        "python save.py a | while read line; do echo $line; done",
        "trap 'touch a.termed' TERM; python save.py a",
        'python -c \'import subprocess; subprocess.run(["python", "save.py", "a"])\'',
        "timeout 60 python save.py a",
    ],
)
def test_each_program_that_saves_is_asked_once_and_awaited(stop, body) -> None:
    assert stop(body) - {"a.termed"} == {"a.saved1"}


@pytest.mark.parametrize(
    "body",
    [
        "trap 'mv a.saved1 kept.saved' EXIT\npython save.py a; touch b.next",
        "copy() { mv a.saved1 kept.saved; }; trap copy EXIT\npython save.py a & wait; touch b.next",
        'trap "mv a.saved1 kept.saved" 0  # at the end\nsrun a; touch b.next',
        "trap 'mv a.saved1 kept.saved' SIGINT EXIT; timeout 60 python save.py a | tee a.log; touch b.next",
        "bash -c 'trap \"mv a.saved1 kept.saved\" EXIT; python save.py a; true'",
    ],
)
def test_a_trap_for_exit_runs_after_its_programs_have_saved(stop, body) -> None:
    assert stop(body) == {"kept.saved"}


def test_a_trap_for_term_runs_at_once_although_there_is_one_for_exit(stop) -> None:
    assert stop("trap 'touch a.next' EXIT; trap 'touch a.termed; wait' TERM; python save.py a & wait") == {
        "a.next", "a.termed", "a.saved1"
    }  # fmt: skip


def test_programs_in_the_background_all_save(stop) -> None:
    assert stop("python save.py a & python save.py b & wait", 2) == {"a.saved1", "b.saved1"}


def test_a_launcher_that_kills_what_it_started_is_spared(stop) -> None:
    assert stop("srun a") == {"a.saved1"}
    assert stop("srun b | tee b.log; touch b.next") == {"a.saved1", "b.saved1"}


def test_a_program_without_a_handler_exits(stop) -> None:
    began = time.monotonic()
    assert stop("touch a.ready; sleep 100") == set()
    assert stop("touch a.ready; timeout 100 sleep 100") == set()
    assert stop("trap 'touch a.termed' TERM; touch a.ready; sleep 100") == {"a.termed"}
    assert time.monotonic() - began < 90


STARTS_IN_A_THREAD = """
import subprocess, threading
started = threading.Thread(target=lambda: print(subprocess.Popen(["sleep", "60"]).pid, flush=True) or input())
started.start()
"""


def test_a_poll_reads_no_other_processes(monkeypatch) -> None:
    """It reads them only on a kernel without lists of children."""
    process = subprocess.Popen([sys.executable, "-c", STARTS_IN_A_THREAD], stdin=-1, stdout=-1, text=True)
    try:
        pid = int(process.stdout.readline())
        assert [*proc.below(process.pid, proc.children_in_proc(is_whole=True))] == [pid]
        monkeypatch.setattr(Path, "glob", None)
        assert [one.pid for one in running_below(process.pid)] == [pid]
        end_descendants(process.pid)
        assert not running_below(process.pid)
    finally:
        process.communicate("\n")

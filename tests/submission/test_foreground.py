"""`toolkit run` on a terminal: Ctrl-C once and twice, before anything hears it, and a terminal that is lost."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from toolkit.rundir.layout import RunDirectory
from toolkit.submission.foreground import Interrupts

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))


@pytest.fixture
def here(toolkit, terminal):
    """`toolkit run` of a line of shell on a terminal; the run's state afterwards."""

    class Here:
        def run(self, command: str, *words: str):
            self.terminal = terminal(
                [TOOLKIT, "run", str(toolkit.job(command)), *words], cwd=toolkit.folder, env=dict(os.environ)
            )
            return self.terminal

        def status(self) -> dict:
            return json.loads(toolkit.ok("status", "--json"))

    return Here()


def test_ctrl_c_asks_and_twice_kills(here, toolkit) -> None:
    window = here.run("trap 'echo asked' TERM; echo up; for i in $(seq 6000); do sleep 0.1; done")
    window.until("up")
    window.interrupt()
    window.until("press Ctrl-C again to kill it")
    window.until("asked")
    window.interrupt()
    assert window.wait() == 130
    assert here.status()["state"] == "stopped"
    # What was asked of this start is not asked of the next one.
    assert toolkit("resume", "last", "--here", "--set", 'job.entry=["echo", "again"]').out == "again\n"
    assert here.status()["state"] == "completed"


def test_ctrl_c_before_the_supervisor_hears_it(here) -> None:
    """Nothing is lost between the first line on the screen and the first rank."""
    window = here.run("sleep 600")
    window.until(", in /")
    window.interrupt()
    assert window.wait() == 130, window.screen
    assert here.status()["state"] == "stopped"


def test_ctrl_c_inside_a_write_to_stderr(tmp_path, monkeypatch, capfd) -> None:
    """Its handler runs while the buffer of stderr is locked."""
    run = RunDirectory(tmp_path)
    run.control.mkdir()

    class Interrupted(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data) -> int:
            os.kill(os.getpid(), signal.SIGINT)
            return len(data)

    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Interrupted()), write_through=True))
    with Interrupts(run) as interrupts:
        print("run 20261127-000000-abcd", file=sys.stderr, flush=True)
        assert interrupts.asked
    assert (run.control / "stop").exists()
    assert "press Ctrl-C again to kill it" in capfd.readouterr().err


def test_a_lost_terminal_ends_no_run(here, toolkit) -> None:
    gate = toolkit.folder / "gate"
    window = here.run(f"echo up; until test -e {gate}; do sleep 0.1; done; echo end")
    window.until("up")
    window.hang_up()
    window.process.wait(60)
    assert here.status()["state"] == "running"
    gate.touch()
    assert toolkit("wait", "last").code == 0
    assert toolkit.ok("logs", "--rank", 0) == "up\nend\n"


def test_term_cancels_the_run_and_explain_names_it(here, toolkit) -> None:
    window = here.run("echo up; sleep 600")
    window.until("up")
    for _ in range(3):  # as `timeout` does, which signals its child and then its group
        window.process.terminate()
        time.sleep(0.001)
    assert window.wait() == 143
    assert here.status()["state"] == "cancelled"
    assert "why       requested by SIGTERM to `toolkit run` at 20" in toolkit("explain", "last").out


def test_a_batch_script_without_a_signal_ends_at_its_time_and_not_before(toolkit) -> None:
    script = toolkit.folder / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --time=0:03\necho hello; sleep 60; echo too late\n")
    ended = toolkit("run", script)
    assert ended.code == 140 and "hello" in ended.out and "too late" not in ended.out, ended

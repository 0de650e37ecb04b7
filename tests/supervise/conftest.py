"""A supervisor as the rendered script starts it. After each test nothing that it started may still run."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from toolkit.rundir.files import read_json, read_lines
from toolkit.rundir.layout import RunDirectory

PATIENCE_S = 10.0


class Supervised:
    """One supervisor at work. `mark` stands in the environment of everything that descends from it."""

    def __init__(self, run: RunDirectory, job: dict, start: int = 0) -> None:
        self.run = run
        self.mark = f"TOOLKIT_TEST_MARK={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "PYTHONPATH") if key in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "toolkit.supervise", str(run.path)],
            env={**kept, name: value, "TOOLKIT_LOCAL": "1", "TOOLKIT_START": str(start)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.process.stdin.write(json.dumps(job))
        self.process.stdin.close()
        self.process.stdin = None

    def wait(self) -> int:
        """The supervisor's exit code; what it said is in `log`."""
        self.log, _ = self.process.communicate(timeout=240)
        return self.process.returncode

    def until_log_says(self, text: str, rank: int = 0, attempt: int = 0) -> None:
        """Wait until a rank has printed `text`."""
        path = self.run.attempt(attempt).log_file(rank)
        assert eventually(lambda: path.exists() and text in path.read_text(), 30), f"rank {rank} is silent"

    def end(self, attempt: int = 0) -> dict:
        return read_json(self.run.attempt(attempt).exit_file)

    def events(self, attempt: int = 0) -> list[str]:
        return [record["event"] for record in read_lines(self.run.attempt(attempt).events)]

    def rank_log(self, rank: int, attempt: int = 0) -> str:
        return self.run.attempt(attempt).log_file(rank).read_text()

    def living(self) -> list[str]:
        """Command lines of all living processes that carry the mark, the supervisor's own left out."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if int(folder.name) == self.process.pid or self.mark.encode() not in (folder / "environ").read_bytes():
                    continue
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


def eventually(condition, patience_s: float = PATIENCE_S) -> bool:
    """True as soon as `condition()` is; False when it is not within `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(held)


@pytest.fixture
def supervise(run_directory):
    """Start a supervisor for a resolved job, in the test's run directory."""
    started: list[Supervised] = []

    def start(job, **more):
        started.append(Supervised(run_directory, job, **more))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGKILL)
            one.process.wait()
        assert eventually(lambda one=one: not one.living()), f"orphans: {one.living()}"

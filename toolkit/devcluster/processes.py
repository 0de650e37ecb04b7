"""Run system programs, and find the running processes of a dev cluster.

The cluster folder in its command line identifies a process. A stale PID file could refer to an unrelated process.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.devcluster.packages import SEARCH_PATH
from toolkit.errors import OwnFailureError


def clean_environment(**extra: str) -> dict[str, str]:
    """Return a minimal environment for daemons, so that they do not pass variables of the user's shell to jobs."""
    return {"PATH": SEARCH_PATH, "LANG": "C.UTF-8", "HOME": "/root", **extra}


def run_program(argv: Sequence[str], *, stdin: str = "", env: dict[str, str] | None = None) -> str:
    """Run a program until it exits, and return its stdout. Raises OwnFailureError if it fails."""
    done = subprocess.run(
        argv, input=stdin, capture_output=True, text=True, env=env or clean_environment(), check=False
    )
    if done.returncode:
        problem = (done.stderr.strip() or done.stdout.strip() or "no output").replace("\n", "; ")
        raise OwnFailureError(f"`{' '.join(argv)}` exited with code {done.returncode}: {problem}")
    return done.stdout


def find_processes(program: str, *arguments: str) -> list[int]:
    """Return the PIDs of running processes named `program` with all of `arguments` on their command line."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        argv = _command_line(entry)
        if argv and Path(argv[0]).name == program and all(argument in argv for argument in arguments):
            pids.append(int(entry.name))
    return sorted(pids)


def _command_line(process: Path) -> list[str]:
    """Return the command line of a process; [] if it has exited, also for zombies."""
    try:
        content = (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return content.decode(errors="replace").rstrip("\0").split("\0") if content else []


def kill_and_wait(pids: Sequence[int], *, timeout_s: float = 10.0) -> None:
    """Kill processes with SIGKILL and wait for them. Raises OwnFailureError if one remains after `timeout_s`."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if not wait_until(lambda: not any(_command_line(Path(f"/proc/{pid}")) for pid in pids), timeout_s):
        raise OwnFailureError(f"cannot kill processes {list(pids)} within {timeout_s:g} s", fix="inspect them with ps")


def wait_until(condition: Callable[[], bool], timeout_s: float, *, poll_s: float = 0.02) -> bool:
    """Poll `condition`; return True as soon as it is true, or False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True

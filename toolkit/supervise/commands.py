"""Run commands that prepare a start, such as a Slurm step that copies files to its nodes, with a time limit."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolkit.supervise.launchers import end_session
from toolkit.supervise.parent_death import die_with_parent
from toolkit.supervise.requests import StopRequest

POLL_S = 0.2
PIPES_S = 5.0  # time to read the remaining output of a killed command


@dataclass(frozen=True)
class Done:
    """The output of a command, and why it failed ("" if it did not). `has_ended` is false if the command was killed."""

    out: str
    problem: str
    has_ended: bool = True


def run_command(argv: Sequence[str], environ: Mapping[str, str], *, timeout_s: float, request: StopRequest) -> Done:
    """Run a command until it exits, times out, or a stop is requested.

    The command runs in its own session, so that a Ctrl-C at the terminal reaches only the supervisor.
    """
    try:
        process = subprocess.Popen(
            argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
    except OSError as error:
        return Done("", f"cannot start {argv[0]}: {error.strerror}")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            out, err = process.communicate(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            if request.came:
                return Done(_ended(process), f"{argv[0]} was killed because a stop was requested", has_ended=False)
            if time.monotonic() > deadline:
                return Done(_ended(process), f"{argv[0]} did not finish within {timeout_s:.0f} s", has_ended=False)
            continue
        lines = [line for line in err.splitlines() if line.strip()]
        reason = lines[0] if lines else f"{argv[0]} exited with {process.returncode}"
        return Done(out, reason if process.returncode else "")


def _ended(process: subprocess.Popen[str]) -> str:
    """Kill a command; return what it had printed."""
    end_session(process)
    try:
        return process.communicate(timeout=PIPES_S)[0]
    except subprocess.TimeoutExpired:  # a process that hangs on a file system cannot be killed
        return ""

"""Commands that prepare a start, such as a step that copies files to its nodes: none outlives its time or the start."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolkit.supervise.launchers import end_session
from toolkit.supervise.lifeline import die_with_parent
from toolkit.supervise.requests import StopRequest

POLL_S = 0.2
PIPES_S = 5.0  # for what a command that was ended still has to say


@dataclass(frozen=True)
class Done:
    """What a command printed, and why it failed, in a line; "" where it did not. One that was given up has not ended."""

    out: str
    problem: str
    has_ended: bool = True


def run_command(argv: Sequence[str], environ: Mapping[str, str], *, timeout_s: float, request: StopRequest) -> Done:
    """Run a command until its end, its time-out, or until the start is asked to end.

    It has a session of its own, so that a Ctrl-C at the terminal reaches the supervisor alone.
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
                return Done(
                    _ended(process), f"{argv[0]} was given up, since this start is asked to end", has_ended=False
                )
            if time.monotonic() > deadline:
                return Done(_ended(process), f"{argv[0]} did not end in {timeout_s:.0f} s", has_ended=False)
            continue
        lines = [line for line in err.splitlines() if line.strip()]
        said = lines[0] if lines else f"{argv[0]} ended with {process.returncode}"
        return Done(out, said if process.returncode else "")


def _ended(process: subprocess.Popen[str]) -> str:
    """End a command; what it had printed."""
    end_session(process)
    try:
        return process.communicate(timeout=PIPES_S)[0]
    except subprocess.TimeoutExpired:  # it cannot be killed: a file system keeps it
        return ""

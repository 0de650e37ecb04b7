"""Run a command under a time limit: a broken driver must not stop a job."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from toolkit.errors import ToolkitError
from toolkit.topology.claims import About, Answer

COMMAND_TIMEOUT_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True)
class CommandResult:
    """What a command printed, or why there is nothing."""

    output: str | None
    missing: str = ""


def run_command(arguments: tuple[str, ...], timeout_s: float = COMMAND_TIMEOUT_S) -> CommandResult:
    """Run a command and return its output; never raises for what the command does, never waits longer."""
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return CommandResult(None, f"{arguments[0]}: {error.strerror or error}")
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        # A process that hangs inside the driver does not die even now, so nobody waits for it.
        if process.stdout:
            process.stdout.close()
        return CommandResult(None, f"{' '.join(arguments)} gave no answer in {timeout_s:g} s and was killed")
    if process.returncode != 0:
        last = (output.strip().splitlines() or ["no output"])[-1]
        return CommandResult(None, f"{' '.join(arguments)} ended with {process.returncode}: {last[:200]}")
    return CommandResult(output)


def ask_command(
    command: tuple[str, ...],
    parse: Callable[[str], tuple[T, tuple[str, ...]]],
    tells: tuple[About, ...],
    timeout_s: float,
) -> tuple[Answer, T | None]:
    """Run a command and read its output: (an answer with warnings or the reason for no facts, the facts)."""
    answer = Answer(" ".join(command), "printed", covers=tells)
    result = run_command(command, timeout_s)
    if result.output is None:
        answer.miss(result.missing)
        return answer, None
    return answer, read_text(result.output, parse, answer)


def read_text(text: str, parse: Callable[[str], tuple[T, tuple[str, ...]]], answer: Answer) -> T | None:
    """The facts of an output, whose warnings go to the answer; None if it is not the output of the command."""
    try:
        facts, warnings = parse(text)
    except ToolkitError as error:
        answer.miss(f"{answer.source}: {error.message}")
        return None
    answer.warnings += [f"{answer.source}: {warning}" for warning in warnings]
    return facts

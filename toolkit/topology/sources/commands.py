"""Run a command with a time limit, so that a broken driver does not block a job."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from toolkit.errors import ToolkitError
from toolkit.topology.claims import About, Answer

__all__ = ["COMMAND_TIMEOUT_S", "ask_command", "read_text", "run_command"]

COMMAND_TIMEOUT_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True)
class CommandResult:
    """The output of a command, or the reason why it is missing."""

    output: str | None
    missing: str = ""


def run_command(arguments: tuple[str, ...], timeout_s: float = COMMAND_TIMEOUT_S) -> CommandResult:
    """The output of a command. A failure of the command is a reason, not an exception."""
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
        # A process that hangs inside the driver survives SIGKILL, so toolkit does not wait for it.
        if process.stdout:
            process.stdout.close()
        return CommandResult(None, f"{' '.join(arguments)} did not finish within {timeout_s:g} s and was killed")
    if process.returncode != 0:
        last = (output.strip().splitlines() or ["no output"])[-1]
        return CommandResult(None, f"{' '.join(arguments)} exited with {process.returncode}: {last[:200]}")
    return CommandResult(output)


def ask_command(
    command: tuple[str, ...],
    parse: Callable[[str], tuple[T, tuple[str, ...]]],
    covers: tuple[About, ...],
    timeout_s: float,
) -> tuple[Answer, T | None]:
    """(an answer with the warnings, or with the reason for missing facts; the facts in the output of a command)."""
    answer = Answer(" ".join(command), "printed", covers)
    result = run_command(command, timeout_s)
    if result.output is None:
        answer.miss(result.missing)
        return answer, None
    return answer, read_text(result.output, parse, answer)


def read_text(text: str, parse: Callable[[str], tuple[T, tuple[str, ...]]], answer: Answer) -> T | None:
    """The facts in the output of a command; None if the output is not valid. Adds the warnings to the answer."""
    try:
        facts, warnings = parse(text)
    except ToolkitError as error:
        answer.miss(f"{answer.source}: {error.message}")
        return None
    answer.warnings += [f"{answer.source}: {warning}" for warning in warnings]
    return facts

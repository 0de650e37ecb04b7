"""Find the steps and commands that failed inside a batch script that exited with 0, in sacct and in the script's log."""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.rundir.attempt_records import FAILED_INSIDE, SCRIPT_DONE
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.rank_logs import find_log
from toolkit.rundir.states import Cause
from toolkit.slurm.commands import Slurm
from toolkit.slurm.job_facts import base_state
from toolkit.supervise.allocation import ANSWER_S, Allocation
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.rank_evidence import complete_fix
from toolkit.supervise.symptoms import OUT_OF_MEMORY, STEP_FAILED
from toolkit.terminal.talk import clean

ACCOUNTING_S = 5.0  # time for the ends of the last steps to reach the accounting database
POLL_S = 0.5
SKEW_S = 2.0  # between the clocks of this node and of slurmctld
SEARCHED_BYTES = 4 << 20  # of the end of the log
STEPS_NAMED = 3
_STEP = re.compile(r"\d+(?:_\d+)?(?:\+\d+)?\.(\d+)")
_OPEN_STATES = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED")
_NO_MEMORY = 137  # the code of a process that is killed for its memory
_REQUESTED = (1, 2, 10, 12, 13, 15)  # of a stop, a walltime or the script: HUP, INT, USR1, USR2, PIPE, TERM
_SIGNALS = {
    "Segmentation fault": 11, "Memory fault": 11, "Killed": 9, "Aborted": 6, "Abort": 6, "Bus error": 7, "Illegal instruction": 4,
    "Floating point exception": 8, "Trace/breakpoint trap": 5, "CPU time limit exceeded": 24, "File size limit exceeded": 25,
    "Bad system call": 31, "segmentation fault": 11, "killed": 9, "abort": 6, "bus error": 7, "illegal hardware instruction": 4,
}  # fmt: skip
_SIGNAL, _OF_ZSH = ("|".join(one for one in _SIGNALS if one[0].islower() is is_zsh) for is_zsh in (False, True))
_OF_SRUN, _OF_MEMORY, _OF_SHELL = "a step", "memory", "a command"
_PATTERNS = tuple(
    (name, re.compile(pattern.encode(), re.MULTILINE))
    for name, pattern in (
        (_OF_SRUN, rf"^srun: error: \S+ tasks? [\d,-]+: (?:Exited with exit code (?P<code>\d+)|(?P<signal>{_SIGNAL})\b).*$"),
        (_OF_SRUN, r"^srun: error: Unable to (?:create step|confirm allocation) for job .*$"),
        (_OF_MEMORY, r"^(?:slurmstepd\S*: error: .*(?i:exceeded (?:job |step )?memory limit|oom[-_ ]kill)|srun: error: \S+ task.*: Out Of Memory).*$"),
        # bash and ksh name the line of the script, zsh also the command; dash prints only the signal.
        (_OF_SHELL, rf"^(?P<script>\S.*): line (?P<at>\d+): +(?:\d+:? )?(?P<signal>{_SIGNAL})(?: \(core dumped\))?(?: +(?P<command>\S.*))?$"),
        (_OF_SHELL, rf"^\S+:\d+: (?P<zsh>{_OF_ZSH})(?: \(core dumped\))?  +\S.*$"),
        (_OF_SHELL, rf"^(?P<signal>{_SIGNAL})(?: \(core dumped\))?$"),
        ("mpirun", r"^(?:  Exit code: +|=   EXIT CODE: )(?P<code>\d+)$"),
        ("mpirun", r"^mpirun noticed that process rank .* exited on signal (?P<number>\d+).*$"),
        ("torchrun", r"^ +exitcode +: (?P<code>\d+) .*$"),
    )
)  # fmt: skip
_SIGKILL = 9
_KILLS = re.compile(r"\b(?:p?kill|killall|timeout)\b|(?<![&>])&(?![&>])")  # or starts a background job
_STARTS_STEPS = re.compile(rb"srun|mpirun|mpiexec")
_STEP_ID = re.compile(r"step(?:id=| )\d+(?:_\d+)?(?:\+\d+)?\.(\d+)", re.IGNORECASE)
_CANCELLED_STEP = re.compile(rb"^(?:slurmstepd\S*|srun): error: \*\*\* STEP \S+ ON \S+ CANCELLED AT ", re.MULTILINE)


class _Step(NamedTuple):
    """A step in the accounting database; sorted by the time at which it ended."""

    ended: str
    number: int
    state: str
    code: str
    name: str


@dataclass(frozen=True)
class FailedStep:
    """A failed step or command, its exit code, and the line that shows it; `source` is below the attempt, or sacct."""

    name: str
    code: int
    source: str
    line: str
    is_step: bool = True
    is_of_memory: bool = False


def end_of_script(
    end: AttemptEnd, attempt: AttemptDirectory, allocation: Allocation, *, began: float, must_succeed: bool
) -> AttemptEnd:
    """Return the end of a batch script that exited with 0 or was stopped, with the steps that failed inside it since `began`.

    Like sbatch, toolkit follows the exit code of the script, unless `must_succeed`: then the first of them fails it.
    """
    failed, is_stopped = _failed_steps(attempt, allocation, began), end.cause is not Cause.COMPLETED
    if not failed:
        return end if is_stopped else replace(end, reason=SCRIPT_DONE)
    symptom = OUT_OF_MEMORY if any(one.is_of_memory for one in failed) else STEP_FAILED
    named = [f"{one.name} failed ({one.code})" for one in failed[:STEPS_NAMED]]
    named += [f"{len(failed) - STEPS_NAMED} more"] * (len(failed) > STEPS_NAMED)
    steps = ", ".join(named[:-1]) + " and " + named[-1] if named[1:] else named[0]
    end = replace(end, evidence=[(one.source, one.line) for one in failed[:STEPS_NAMED]])
    if is_stopped:
        return replace(
            end, reason=f"{end.reason}; {steps} while it stopped", fix=end.fix or "read in its log whether it has saved"
        )
    end = replace(end, reason=FAILED_INSIDE + steps, symptom=symptom.word)
    fix = complete_fix(symptom, attempt)
    if must_succeed:
        fix = fix if symptom is OUT_OF_MEMORY else ""
        return replace(end, cause=Cause.CRASHED, exit_code=failed[0].code, fix=fix)
    return replace(end, fix=fix)


def _failed_steps(attempt: AttemptDirectory, allocation: Allocation, began: float) -> list[FailedStep]:
    """Return failed steps by the time at which they ended, then a failed command. The log does not number every step."""
    lines = list(_lines(attempt))
    of_srun = [one for one in lines if one.name == _OF_SRUN]
    has_steps = not (script := _script_of(attempt)) or _STARTS_STEPS.search(script + _text_of(attempt))
    steps, deadline = _accounted(allocation, began) if has_steps else None, time.monotonic() + ACCOUNTING_S
    while steps is not None and time.monotonic() < deadline:
        if all(step.state not in _OPEN_STATES for step in steps) and (any(map(_code, steps)) or not of_srun):
            break
        time.sleep(POLL_S)
        steps = _accounted(allocation, began)
    named = {
        name: FailedStep(
            name, code, "sacct", f"{allocation.job_id}.{step.number} {step.name} {step.state} {step.code}",
            is_of_memory=step.state == "OUT_OF_MEMORY",
        )
        for step in sorted(steps or (), reverse=True)
        if (code := _code(step)) and (name := f"step {step.number}")
    }  # fmt: skip
    found = [*reversed(named.values())]
    # Slurm cancels a step that exceeds its memory, so accounting may not call it failed.
    numbered = {one.name: one for one in lines if one.is_step and one.name != _OF_SRUN and one.name not in named}
    found = [*found, *numbered.values()] or of_srun[:1]
    codes = {one.code for one in found}
    return [*found, *[one for one in lines if not one.is_step and one.code not in codes][:1]]


def _accounted(allocation: Allocation, began: float) -> list[_Step] | None:
    """Return each step since `began`; None without accounting."""
    if not allocation.in_slurm:
        return None
    options = f"--noheader --parsable2 --format=JobID,Start,End,State,ExitCode,JobName --jobs={allocation.job_id}"
    try:
        text = Slurm(cluster=allocation.cluster, timeout_s=ANSWER_S).call(["sacct", *options.split()])
    except (NotFoundError, SchedulerRefusedError):  # not every site has accounting; the log then names failed steps
        return None
    steps = []
    for line in text.splitlines():
        job, start, end, state, code, name = [*line.split("|", maxsplit=5), *[""] * 6][:6]
        is_new = start[:1].isdigit() and datetime.fromisoformat(start).timestamp() >= began - SKEW_S
        if (step := _STEP.fullmatch(job)) and is_new:
            steps.append(_Step(end, int(step[1]), base_state(state), code, name))
    return steps


def _code(step: _Step) -> int:
    """Return the exit code of a failed step; 0 if it succeeded, or if a stop or the script itself ended it."""
    own, _, number = step.code.partition(":")
    if step.state == "OUT_OF_MEMORY":
        return _NO_MEMORY
    if step.state not in ("FAILED", "TIMEOUT", "NODE_FAIL") or not own.isdigit() or not number.isdigit():
        return 0
    return _unless_requested(int(own) or (128 + int(number) if int(number) else 1))


def _unless_requested(code: int) -> int:
    return 0 if code - 128 in _REQUESTED else code


def _lines(attempt: AttemptDirectory) -> Iterator[FailedStep]:
    """Yield the failures that the log of the script shows, in the order of `_PATTERNS`."""
    log, text, script = f"logs/{find_log(attempt, 0).name}", _text_of(attempt), _script_of(attempt)
    is_cancelled = _CANCELLED_STEP.search(text) is not None  # the ends of its tasks follow from that
    for name, pattern in _PATTERNS:
        for match in pattern.finditer(text):
            line = clean(match[0].decode(errors="replace")).strip()
            if name == _OF_MEMORY:
                step = _STEP_ID.search(line)
                known = f"step {step[1]}" if step else _OF_SRUN if line.startswith("srun") else _OF_SHELL
                yield FailedStep(known, _NO_MEMORY, log, line, known != _OF_SHELL, is_of_memory=True)
                continue
            groups = {group: value.decode(errors="replace") for group, value in match.groupdict().items() if value}
            signal = groups.get("signal") or groups.get("zsh", "")
            number = int(groups.get("number") or _SIGNALS.get(signal, 0))
            code = int(groups.get("code") or (128 + number if number else 1))
            is_own = name == _OF_SHELL and _is_ended_by_script(script.decode(errors="replace"), number, groups)
            if _unless_requested(code) and not is_own and not (is_cancelled and name == _OF_SRUN):
                yield FailedStep(name, code, log, line, name == _OF_SRUN)


def _text_of(attempt: AttemptDirectory) -> bytes:
    """Return the end of the log of the script."""
    log = find_log(attempt, 0)
    if not log.exists():
        return b""
    with log.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, 2) - SEARCHED_BYTES))
        return stream.read()


def _script_of(attempt: AttemptDirectory) -> bytes:
    script = attempt.run.batch_script
    return script.read_bytes() if script.exists() else b""


def _is_ended_by_script(script: str, number: int, groups: Mapping[str, str]) -> bool:
    """Return whether a line of the shell only looks like a failed command, or reports a kill by the script itself.

    Shells print the same line for a background job. That of bash has the number of the line of a foreground command, or
    of the `wait` for a background one. Which process killed that one is unknown, so it is not a failure.
    """
    lines = script.splitlines()
    if "signal" in groups and "at" not in groups and "bash" in "".join(lines[:1]):
        return True  # bash names the line of the script: this is output of a program
    if number != _SIGKILL or not lines:
        return False
    if "at" not in groups:
        return _KILLS.search(script) is not None
    at = int(groups["at"])  # the last line of a command with continuations
    begin = next((one for one in range(at - 1, 0, -1) if not "".join(lines[one - 1 : one]).endswith("\\")), 0)
    line = " ".join(lines[begin:at])
    return _KILLS.search(line) is not None or not all(part in line for part in groups.get("command", "").split()[:1])

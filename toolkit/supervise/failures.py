"""Which rank failed first, and why: read from what ranks left in the attempt's folder."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from toolkit.rundir.files import read_json, tail_text
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.states import Cause

LAST_LINES = 8
# A rank that sees another one vanish fails a moment later, in words like these. It is not the culprit.
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|nccl|socket ?timeout|store|peer", re.IGNORECASE
)
# How srun and Open MPI name a rank that died. Hydra names the first process it knows, whichever died.
_BLAMES = (re.compile(r"srun: error: \S+: task (\d+): "), re.compile(r"process rank (\d+) with PID"))
_SIGNAL = re.compile(r"signal (\d+)")
# ECMA-48: each sequence begins with ESC and a letter, or with the one control character (0x80 to 0x9f) for both.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[@-Z\\-_]|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended. `rank` and `host` name the culprit, None where no single rank is to blame."""

    cause: Cause
    reason: str
    exit_code: int = 0
    rank: int | None = None
    host: str | None = None
    fix: str = ""
    last_lines: list[str] = field(default_factory=list)
    step: int | None = None


def clean(line: str) -> str:
    """A log line without terminal escapes and control characters, so that quoting it is safe."""
    return _ESCAPES.sub("", line)


def first_failure(attempt: AttemptDirectory) -> AttemptEnd | None:
    """The failure that the others follow from; None when no rank has left an error."""
    errors = [read_json(path) for path in sorted(attempt.errors.glob("rank-*.json"))]
    if not errors:
        return None
    culprit = min(errors, key=lambda error: (_is_consequence(error), error["time"]))
    lines = tail_text(attempt.log_file(culprit["rank"]), LAST_LINES)
    return AttemptEnd(
        cause=Cause.CRASHED,
        reason=clean(culprit["reason"]),
        exit_code=culprit["exit_code"],
        rank=culprit["rank"],
        host=culprit["host"],
        fix=culprit.get("fix", ""),
        last_lines=[clean(line) for line in lines],
    )


def _is_consequence(error: dict[str, object]) -> bool:
    if error["kind"] == "signal":  # launchers send TERM to the ranks that are left
        return error["reason"] == "killed by SIGTERM"
    return error["kind"] == "exception" and bool(_CONSEQUENCE.search(str(error["reason"])))


def silent_end(attempt: AttemptDirectory, ranks: int, launcher_code: int) -> AttemptEnd:
    """The launcher is gone, ranks are unfinished and none says why."""
    lines = [clean(line) for line in tail_text(attempt.logs / "launcher.log", LAST_LINES)]
    started = sorted(int(path.stem.split("-")[1]) for path in attempt.ranks.glob("rank-*.json"))
    code = _shell_code(launcher_code) or 1
    if not started:
        return AttemptEnd(
            Cause.LAUNCH_FAILED,
            f"the launcher ended with code {launcher_code} before any rank started",
            code,
            last_lines=lines,
        )
    missing = [rank for rank in range(ranks) if not attempt.done_marker(rank).exists()]
    if not missing:  # the last marker came in sight only now
        return AttemptEnd(Cause.COMPLETED, "every rank is done")
    signal_number = _signal_said(lines)
    if signal_number:
        code = 128 + signal_number
    rank = _culprit_by_launcher(lines)
    if rank is None and len(missing) == 1:
        rank = missing[0]
    listed = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
    reason = f"rank {listed} ended without a word; the launcher's code is {launcher_code}"
    host = read_json(attempt.rank_file(rank))["host"] if rank in started else None
    lines = lines or [clean(line) for line in tail_text(attempt.log_file(missing[0]), LAST_LINES)]
    return AttemptEnd(Cause.CRASHED, reason, code, rank, host, last_lines=lines)


def _culprit_by_launcher(lines: list[str]) -> int | None:
    """The rank that a launcher's own words blame; None when they blame no single one."""
    matches = [match for pattern in _BLAMES if (match := pattern.search("\n".join(lines)))]
    return int(matches[0][1]) if matches else None


def _signal_said(lines: list[str]) -> int:
    """The signal that a launcher says it was, 0 for none."""
    match = _SIGNAL.search("\n".join(lines))
    return int(match[1]) if match else 0


def _shell_code(code: int) -> int:
    """A process's return code as a shell gives it: 128 + signal for one that a signal ended."""
    return 128 - code if code < 0 else code

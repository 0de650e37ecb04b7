"""Find which rank failed first, and why, from the files that ranks left in the attempt folder."""

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.metrics.samples import MemorySample
from toolkit.rundir.attempt_records import StartRecord
from toolkit.rundir.files import read_json, tail_text, why_unwritable
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.rank_logs import find_log, tail_of
from toolkit.rundir.states import Cause
from toolkit.supervise.error_lines import CHILD_DIED, CONSEQUENCE, ErrorLine, error_line, users_position
from toolkit.supervise.node_state import samples_in
from toolkit.supervise.rank_evidence import HANGS, LINES_SEARCHED, RankEvidence, complete_fix, find_in_ranks
from toolkit.supervise.rank_files import begun_ranks, host_of, named
from toolkit.supervise.stacks import FINISHED, innermost
from toolkit.supervise.symptoms import (
    COLLECTIVE_MISMATCH,
    COLLECTIVE_TIMEOUT,
    DISK_FULL,
    EXCEPTION,
    EXIT_CODE,
    FAILED,
    KILLED,
    LAUNCH_FAILED,
    NATIVE_CRASH,
    OUT_OF_MEMORY,
    PEER_LOST,
    REFUSED,
    SILENT,
    Symptom,
    SymptomMatch,
    match_symptom,
)
from toolkit.terminal.talk import clean

LAST_LINES = 8
LINES_MATCHED = 60  # at the end of a log; a long explanation may follow the error line
LINES_OF_RANKS = 5000  # of a log in which all ranks of a program report their errors
LATE_SHOWN = 3
_LEADS = 2.0  # a rank that uses this multiple of the memory of any other one on its node filled it
LATE_S = 0.5  # ranks that wait in the same collective time out within this time of each other
_CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
# Log lines of a rank that native code aborted: the last C++ exception, or the report of NCCL's watchdog.
_LAST_WORDS = re.compile(r"what\(\):|Watchdog caught|dump signal|gloo::")
# After such a line, Open MPI prints the native stack of a process that a signal kills.
_NATIVE_STACK = re.compile(r"\*\*\* Process received signal \*\*\*")
_AGREED = re.compile(r"(?:not saved|could not be loaded): rank (\d+): ")
# How srun and Open MPI name a failed rank. Hydra always names the first process in its list.
_BLAMES = (re.compile(r"srun: error: \S+: task (\d+): "), re.compile(r"process rank (\d+) with PID"))
_SIGNAL = re.compile(r"signal (\d+)")
_FUNCTION = re.compile(r'\s*File "[^"]+", line \d+, in (\S+)')
_POINT_TO_POINT = re.compile(r"send|recv")  # a rank may wait there for one that is elsewhere
# How slurmstepd and srun name the node whose step exceeded its memory, or whose task the kernel killed for it.
_OUT_OF_MEMORY_ON = re.compile(
    r"slurmstepd-(?P<daemon>[\w.-]+?): .*(?:exceeded \S*\s?memory limit|oom[-_ ]kill)|srun: error: (?P<node>[\w.-]+): tasks? [\d,-]+: Out Of Memory",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended. `rank` and `host` identify the rank that failed first; None if no single rank is to blame.

    `symptom` is one of the stable names in docs/explain.md, "" if the cause says enough. `evidence` contains pairs of a
    file path, relative to the attempt folder, and the line that shows the reason. `cannot_pass` is true if another
    launch would fail in the same way.
    """

    cause: Cause
    reason: str
    exit_code: int = 0
    rank: int | None = None
    host: str | None = None
    fix: str = ""
    last_lines: list[str] = field(default_factory=list)
    step: int | None = None
    symptom: str = ""
    evidence: list[tuple[str, str]] = field(default_factory=list)
    cannot_pass: bool = False
    changed_files: bool | None = None  # whether files that `restart.progress` matches changed during the attempt
    new_files: bool | None = None  # whether one of them has a name that no earlier attempt had
    files: str = ""  # what `restart.progress` matched


def first_failure(attempt: AttemptDirectory) -> AttemptEnd | None:
    """Return the failure that caused the others; None if no rank recorded an error."""
    errors = _errors(attempt)
    if not errors:
        return None
    timed_out_ranks = [error for error in errors if _timed_out(error)]
    culprit = min(errors, key=lambda error: (_is_caused(error, timed_out_ranks), error["time"]))
    if agreed := _AGREED.search(culprit["reason"]):  # all ranks raise the error of one of them
        culprit = next((error for error in errors if error["rank"] == int(agreed[1])), culprit)
    if (mismatch := _mismatch(attempt, errors, culprit, timed_out_ranks)) is not None:
        return mismatch
    if _is_caused(culprit, timed_out_ranks) and match_symptom(_launcher_lines(attempt)) is None:
        blamed = late_to_a_collective(attempt, errors) or _vanished(attempt, errors)
        if blamed is not None:
            return blamed
    is_script = attempt.run.batch_script.exists()  # its only process is not a rank of the program
    end = AttemptEnd(
        cause=Cause.REFUSED if culprit["kind"] == "refused" else Cause.CRASHED,
        reason="the script: " * is_script + clean(culprit["reason"]) + users_position(culprit.get("traceback") or []),
        exit_code=culprit["exit_code"],
        rank=culprit["rank"],
        host=culprit["host"],
        fix=culprit.get("fix", ""),
        last_lines=_last_lines(attempt, culprit["rank"]),
    )
    end = _with_symptom(end, culprit, attempt)
    return replace(end, rank=None, host=None if end.host == culprit["host"] else end.host) if is_script else end


def _errors(attempt: AttemptDirectory) -> list[dict[str, Any]]:
    """Return the error records of the ranks, sorted by file name."""
    return [_with_last_words(read_json(path), attempt) for path in sorted(attempt.errors.glob("rank-*.json"))]


def _with_last_words(error: dict[str, Any], attempt: AttemptDirectory) -> dict[str, Any]:
    """Return the record with the new key `said`: its reason, or the log message if gloo or NCCL aborted the process."""
    said = str(error["reason"])
    if error["exit_code"] == 128 + signal.SIGABRT:
        lines = _spoken(attempt, error["rank"])
        said = next((line.strip() for line in lines if _LAST_WORDS.search(line)), said)
    return {**error, "said": said}


def _mismatch(
    attempt: AttemptDirectory, errors: Sequence[dict[str, Any]], culprit: dict[str, Any], timed_out_ranks: Sequence[Any]
) -> AttemptEnd | None:  # fmt: skip
    """Return the end of an attempt whose ranks called different collectives, with the positions of those that report one.

    No rank is blamed: the one that aborts has only noticed the difference.
    """
    own = match_symptom([culprit["said"]])
    if not (_is_caused(culprit, timed_out_ranks) or culprit["kind"] == "exit" or own):
        return None
    found = find_in_ranks(attempt, [COLLECTIVE_MISMATCH])
    if found is None:
        return None
    lines = _last_lines(attempt, culprit["rank"] if found.rank is None else found.rank)
    end = AttemptEnd(
        Cause.CRASHED, found.symptom.means + _calls(attempt, errors), culprit["exit_code"], last_lines=lines
    )
    return _shown_by(end, found, attempt)


def _calls(attempt: AttemptDirectory, errors: Sequence[dict[str, Any]]) -> str:
    """Return the lines of the user's code at which ranks failed, as `: rank 0 at a.py:3: dist.barrier(); rank 1 at ...`."""
    ranks: dict[str, list[int]] = {}
    for error in sorted(errors, key=lambda error: int(error["rank"])):
        if line := _users_line(error.get("traceback") or _spoken(attempt, error["rank"])):
            ranks.setdefault(line, []).append(error["rank"])
    return ": " * bool(ranks) + "; ".join(f"{named(ranks[line])}{line}" for line in list(ranks)[:LATE_SHOWN])


def _shown_by(end: AttemptEnd, found: RankEvidence, attempt: AttemptDirectory) -> AttemptEnd:
    """Return the end with the symptom that a file of a rank shows, and its fix."""
    return replace(
        end, symptom=found.symptom.word, evidence=[(found.file, found.line)], fix=complete_fix(found.symptom, attempt),
        cannot_pass=found.symptom.lasting,
    )  # fmt: skip


def with_hang(end: AttemptEnd, attempt: AttemptDirectory) -> AttemptEnd:
    """Return the end of a stalled attempt, with the reason for which a rank waited forever, if its files show one."""
    found = find_in_ranks(attempt, HANGS)
    if found is None:
        return end
    host = host_of(attempt, found.rank) if found.rank is not None else None
    end = replace(end, reason=f"{end.reason}: {found.symptom.means}", rank=found.rank, host=host)
    return _shown_by(end, found, attempt)


def _vanished(attempt: AttemptDirectory, errors: Sequence[dict[str, Any]]) -> AttemptEnd | None:
    """Return the end if exactly one rank, killed with its guard, left neither error nor done marker; else None."""
    silent = set(begun_ranks(attempt)) - {error["rank"] for error in errors}
    silent = {rank for rank in silent if not attempt.done_marker(rank).exists()}
    if len(silent) != 1:
        return None
    (rank,) = silent
    whose = "its" if len(errors) == 1 else "their"
    others = named([error["rank"] for error in errors])
    reason = f"rank {rank} was killed without reporting an error; {others} lost {whose} connection to it"
    return AttemptEnd(
        Cause.CRASHED, reason, 128 + signal.SIGKILL, rank, host_of(attempt, rank),
        last_lines=_last_lines(attempt, rank), symptom=SILENT.word,
    )  # fmt: skip


def _with_symptom(end: AttemptEnd, culprit: dict[str, Any], attempt: AttemptDirectory) -> AttemptEnd:
    """Add the symptom that the rank's messages show, or else the launcher's, with its evidence and fix."""
    kind, consequence = culprit["kind"], _is_consequence(culprit)
    rank_file = f"errors/{attempt.error_file(culprit['rank']).name}"
    seen, error, log_file = [(rank_file, match_symptom([end.reason]))], None, ""
    lines: list[str] = []
    # An unmanaged program, a child process and native code report their errors only in the log.
    if kind == "exit" or CHILD_DIED.search(end.reason) or end.exit_code - 128 in _CRASH_SIGNALS:
        log_file = f"logs/{find_log(attempt, culprit['rank']).name}"
        lines = _spoken(attempt, culprit["rank"])
        error = _error_in(attempt, culprit["rank"], lines) if kind == "exit" else None
        match = match_symptom(lines[-LINES_MATCHED:], context=lines)
        # Other ranks of the program wait for the one that failed.
        is_effect = error is not None and error.is_cause and match is not None and match.symptom is COLLECTIVE_TIMEOUT
        seen.append((log_file, match_symptom([error.text]) if error is not None and is_effect else match))
    if kind in ("exit", "signal") or consequence:
        seen.append(("logs/launcher.log", match_symptom(_launcher_lines(attempt))))
    shown = next(((file, match) for file, match in seen if match is not None), None)
    if shown is None:
        symptom = _plain_symptom(kind, end, consequence)
        evidence = [(log_file, error.text) if error is not None else (rank_file, end.reason)]
        is_new = error is not None and error.text not in end.reason
        end = replace(end, reason=f"{end.reason}: {error}") if is_new else end
        return replace(end, symptom=symptom.word, fix=end.fix or complete_fix(symptom, attempt), evidence=evidence)
    file, match = shown
    symptom, evidence = match.symptom, [(file, match.line)]
    fix = end.fix or complete_fix(symptom, attempt, lines)
    end = replace(end, symptom=symptom.word, fix=fix, evidence=evidence, cannot_pass=symptom.lasting)
    if symptom is OUT_OF_MEMORY and (blamed := _out_of_memory_on(end, attempt)) is not None:
        return blamed
    # The launcher's message shows the cause; the rank was only affected, so it is not to blame.
    if consequence and file == "logs/launcher.log":
        return replace(_with_the_launchers_reason(end, match, attempt), rank=None, host=None)
    return end


def _error_in(attempt: AttemptDirectory, rank: int, lines: Sequence[str]) -> ErrorLine | None:
    """Return the line that names the error of a program; tracebacks of many ranks may follow the one with the cause."""
    error = error_line(lines[-LINES_MATCHED:])
    if error is None or error.is_cause:
        return error
    return error_line([clean(line) for line in tail_of(attempt, rank, LINES_OF_RANKS)])


def _plain_symptom(kind: str, end: AttemptEnd, consequence: bool) -> Symptom:
    if kind == "signal":
        return NATIVE_CRASH if end.exit_code - 128 in _CRASH_SIGNALS else KILLED
    if kind in ("exception", "failed") and consequence:
        return PEER_LOST
    return {"refused": REFUSED, "failed": FAILED, "exit": EXIT_CODE, "exception": EXCEPTION}[kind]


def late_to_a_collective(attempt: AttemptDirectory, errors: Sequence[dict[str, Any]]) -> AttemptEnd | None:
    """Return the end of an attempt in which ranks timed out in a collective, blaming the late rank; None otherwise.

    torch does not name the late rank. A rank without an error was not in the collective. If every rank has one, the
    late rank is the one that failed clearly later than the waiting ranks, by losing its connections to them.
    """
    waited = [error for error in errors if _timed_out(error)]
    if not waited:
        return None
    first = min(waited, key=lambda error: str(error["time"]))
    begun = StartRecord.read(attempt)
    ranks = begun.ranks if begun is not None else len(errors)
    failed = {error["rank"]: error for error in errors}
    late = [rank for rank in range(ranks) if rank not in failed and not attempt.done_marker(rank).exists()]
    file = f"errors/{attempt.error_file(first['rank']).name}"
    if len(failed) == ranks and _is_mismatch(errors, waited):
        reason = COLLECTIVE_MISMATCH.means + _calls(attempt, errors)
        end = AttemptEnd(Cause.CRASHED, reason, int(first["exit_code"]), last_lines=_last_lines(attempt, first["rank"]))
        return _shown_by(end, RankEvidence(COLLECTIVE_MISMATCH, None, file, clean(first["said"])), attempt)
    late = late or [error["rank"] for error in errors if _came_too_late(error, first)]
    finished = [rank for rank in late or range(ranks) if rank not in failed and _has_finished(attempt, rank)]
    joined = named([error["rank"] for error in waited])
    reason = f"{named(late)} did not join a collective; {joined} waited"
    if finished and finished == (late or finished):
        late, waits = finished, "waits" if len(waited) == 1 else "wait"
        reason = f"{named(finished)} {FINISHED}; {joined} {waits} for {'it' if len(finished) == 1 else 'them'}"
    culprit = late[0] if len(late) == 1 else None
    return AttemptEnd(
        Cause.CRASHED, reason + _users_line(first.get("traceback") or []), int(first["exit_code"]), culprit,
        host_of(attempt, culprit) if culprit is not None else None,
        fix=complete_fix(COLLECTIVE_TIMEOUT, attempt), symptom=COLLECTIVE_TIMEOUT.word,
        last_lines=_last_lines(attempt, culprit) if culprit is not None else [],
        evidence=[(file, clean(first["said"])), *_stacks(attempt, late)],
    )  # fmt: skip


def _is_mismatch(errors: Sequence[dict[str, Any]], waited: Sequence[dict[str, Any]]) -> bool:
    """Return whether no rank was late: all waited in different collectives, or in one that they all had joined.

    A rank that lost its connections in the same collective may only have joined it late.
    """
    called = {_called(error.get("traceback") or []) for error in errors if _is_consequence(error)} - {""}
    is_possible = len(errors) > 1 and bool(called) and not any(map(_POINT_TO_POINT.search, called))
    return is_possible and (len(called) > 1 or len(waited) == len(errors))


def _called(traceback: Sequence[str]) -> str:
    """Return the innermost function of a library, such as all_reduce, or the line of the user's code; "" if unknown."""
    for line, code in zip(reversed(traceback[:-1]), reversed(traceback[1:]), strict=True):
        if frame := _FUNCTION.match(line):
            return code.strip() if users_position([line]) else frame[1]
    return ""


def _has_finished(attempt: AttemptDirectory, rank: int) -> bool:
    return attempt.done_marker(rank).exists() or any(place == FINISHED for _, place in _stacks(attempt, [rank]))


def _stacks(attempt: AttemptDirectory, ranks: Sequence[int]) -> list[tuple[str, str]]:
    """Return pairs of a stack file and the innermost frame in it, for the late ranks that could still write one."""
    known = [path for rank in ranks[:LATE_SHOWN] if (path := attempt.stack_file(rank)).exists()]
    return [(f"errors/{path.name}", innermost(path.read_text("utf-8", "replace"))) for path in known]


def timed_out(attempt: AttemptDirectory) -> bool:
    """Return whether a rank timed out waiting for others in a collective."""
    return any(map(_timed_out, _errors(attempt)))


def _timed_out(error: dict[str, Any]) -> bool:
    seen = match_symptom([error["said"]])
    return _is_consequence(error) and seen is not None and seen.symptom is COLLECTIVE_TIMEOUT


def _came_too_late(error: dict[str, Any], first: dict[str, Any]) -> bool:
    """Return whether the rank failed because others had exited (lost connections, NCCL report), not by a timeout."""
    return not _timed_out(error) and (_seconds(first, error) > LATE_S or "dump signal" in error["said"])


def _seconds(first: dict[str, Any], second: dict[str, Any]) -> float:
    times = [datetime.fromisoformat(str(error["time"])) for error in (first, second)]
    return (times[1] - times[0]).total_seconds()


def _users_line(traceback: Sequence[str]) -> str:
    """Return the innermost frame outside of libraries, as ` at late.py:8: dist.all_reduce(x)`; "" if there is none."""
    for at in range(len(traceback) - 1, -1, -1):
        if position := users_position(traceback[at : at + 1]):
            code = traceback[at + 1].strip() if at + 1 < len(traceback) else ""
            return position + (f": {clean(code)}" if code else "")
    return ""


def _is_consequence(error: dict[str, Any]) -> bool:
    if error["kind"] == "signal":  # launchers send TERM to the remaining ranks
        return error["reason"] == "killed by SIGTERM" or (
            error["said"] != error["reason"] and bool(CONSEQUENCE.search(error["said"]))
        )
    return error["kind"] in ("exception", "failed") and bool(CONSEQUENCE.search(error["said"]))


def _is_caused(error: dict[str, Any], timed_out_ranks: Sequence[dict[str, Any]]) -> bool:
    """Return whether another rank's failure caused this one.

    A rank that waits in gloo of torch 2.13 can crash by SIGSEGV when its peers time out and close their connections. A
    crash that is itself the first failure precedes every timeout by the length of that timeout.
    """
    is_crash = error["kind"] == "signal" and error["exit_code"] - 128 in _CRASH_SIGNALS
    return _is_consequence(error) or (is_crash and any(_seconds(one, error) > -LATE_S for one in timed_out_ranks))


def silent_end(attempt: AttemptDirectory, ranks: int, launcher_code: int) -> AttemptEnd:
    """Return the end of an attempt without error records: no rank started, some vanished, or all are done after all."""
    if not begun_ranks(attempt):
        return _launch_failure(attempt, launcher_code)
    missing = [rank for rank in range(ranks) if not attempt.done_marker(rank).exists()]
    if not missing:  # the last done marker appeared late in the file system
        return AttemptEnd(Cause.COMPLETED, "every rank is done")
    return _vanished_ranks(attempt, missing, launcher_code)


def _launch_failure(attempt: AttemptDirectory, launcher_code: int) -> AttemptEnd:
    reason = f"the launcher exited with code {launcher_code} before any rank started"
    code = _shell_code(launcher_code) or 1
    end = AttemptEnd(Cause.LAUNCH_FAILED, reason, code, last_lines=_launcher_lines(attempt))
    match = _launcher_symptom(attempt)
    if match is None:
        return end
    return replace(_with_the_launchers_reason(end, match, attempt), cannot_pass=match.symptom.lasting)


def _vanished_ranks(attempt: AttemptDirectory, missing: Sequence[int], launcher_code: int) -> AttemptEnd:
    lines = _launcher_lines(attempt)
    rank = _culprit_by_launcher(lines)
    if rank is None and len(missing) == 1:
        rank = missing[0]
    signal_number = _signal_reported(lines)
    end = AttemptEnd(
        Cause.CRASHED,
        f"{named(missing)} exited without reporting an error; the launcher exited with code {launcher_code}",
        128 + signal_number if signal_number else _shell_code(launcher_code) or 1,
        rank,
        host_of(attempt, rank) if rank is not None else None,
        last_lines=lines or _last_lines(attempt, missing[0]),
        symptom=SILENT.word,
    )
    match = _launcher_symptom(attempt)
    if match is not None:
        return _with_the_launchers_reason(end, match, attempt)
    if (found := find_in_ranks(attempt, [*HANGS, COLLECTIVE_MISMATCH])) is not None:
        return _shown_by(replace(end, reason=f"{found.symptom.means}; {end.reason}"), found, attempt)
    if full := why_unwritable(attempt.errors):
        reason = f"{end.reason}: {full}, so no rank could record its error"
        return replace(end, reason=reason, symptom=DISK_FULL.word, fix=complete_fix(DISK_FULL, attempt))
    return end


def _launcher_symptom(attempt: AttemptDirectory) -> SymptomMatch | None:
    """Return the symptom in the launcher's log. srun prints one line per killed rank after the line with the cause."""
    return match_symptom(_launcher_lines(attempt, LINES_MATCHED))


def _with_the_launchers_reason(end: AttemptEnd, match: SymptomMatch, attempt: AttemptDirectory) -> AttemptEnd:
    """Return the end with the reason from the launcher's log."""
    symptom, lines = match.symptom, _launcher_lines(attempt)
    if match.line not in map(str.strip, lines):
        lines = [match.line, *lines[1:]]
    end = replace(
        end, reason=symptom.means, fix=complete_fix(symptom, attempt), symptom=symptom.word, last_lines=lines,
        evidence=[("logs/launcher.log", match.line)],
    )  # fmt: skip
    if symptom is OUT_OF_MEMORY:
        return _out_of_memory_on(end, attempt) or end
    if symptom is LAUNCH_FAILED:  # it depends only on timing which ranks had started
        return replace(end, cause=Cause.LAUNCH_FAILED, rank=None, host=None)
    return end


def _out_of_memory_on(end: AttemptEnd, attempt: AttemptDirectory) -> AttemptEnd | None:
    """Return the end with the node that Slurm names as out of memory, and the rank on it that used most; None if it names none."""
    found = next(filter(None, map(_OUT_OF_MEMORY_ON.search, _launcher_lines(attempt, LINES_SEARCHED))), None)
    if found is None:
        return None
    node = found["daemon"] or found["node"]
    here = {
        rank: host
        for rank in begun_ranks(attempt)
        if (host := host_of(attempt, rank)) and host.partition(".")[0] == node
    }
    rank = end.rank if end.rank in here else None
    if rank is None:
        used = {one.rank: one.used_bytes for one in _last_memory(attempt) if one.rank in here and one.pool == "host"}
        first, second = [*sorted(used, key=lambda one: -used[one]), None, None][:2]
        is_clear = first is not None and (second is None or used[first] > _LEADS * used[second])
        rank = next(iter(here)) if len(here) == 1 else first if is_clear else None
    return replace(end, reason=f"{OUT_OF_MEMORY.means} on node {node}", rank=rank, host=next(iter(here.values()), node))


def _last_memory(attempt: AttemptDirectory) -> list[MemorySample]:
    """Return the last memory samples of all nodes, as far as they can be read."""
    found: list[MemorySample] = []
    for path in attempt.windows.glob("rank-*.json"):
        with suppress(ToolkitError, OSError):
            found += [one for one in samples_in(path) if isinstance(one, MemorySample)]
    return found


def _last_lines(attempt: AttemptDirectory, rank: int) -> list[str]:
    return _spoken(attempt, rank)[-LAST_LINES:]


def _spoken(attempt: AttemptDirectory, rank: int) -> list[str]:
    """Return the last lines of a rank, up to the native stack that Open MPI prints of it."""
    lines = [clean(line) for line in tail_of(attempt, rank, LINES_SEARCHED)]
    stack = next((at for at, line in enumerate(lines) if _NATIVE_STACK.search(line)), len(lines))
    return lines[:stack] or lines


def _launcher_lines(attempt: AttemptDirectory, count: int = LAST_LINES) -> list[str]:
    return [clean(line) for line in tail_text(attempt.launcher_log, count)]


def _culprit_by_launcher(lines: list[str]) -> int | None:
    """Return the first rank that a launcher message blames by itself; None if no message names a single rank."""
    matches = [match for pattern in _BLAMES if (match := pattern.search("\n".join(lines)))]
    return int(matches[0][1]) if matches else None


def _signal_reported(lines: list[str]) -> int:
    """Return the signal number in the launcher's messages; 0 if there is none."""
    match = _SIGNAL.search("\n".join(lines))
    return int(match[1]) if match else 0


def _shell_code(code: int) -> int:
    """Convert a return code of Popen to the shell's convention: 128 + N if signal N killed the process."""
    return 128 - code if code < 0 else code

"""Reads and writes `start.json` and `exit.json`, which record how an attempt started and ended (docs/contract.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from toolkit.errors import DamagedFileError
from toolkit.rundir.files import is_unwritable, read_json_or_none, write_bytes, write_json
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.states import Cause, Next, RunState

__all__ = [
    "FAILED_INSIDE", "FILES_NAMED", "OWN_REQUEUE", "RESERVE_BYTES", "SCRIPT_DONE", "AttemptRecord", "MatchedFiles", "StartRecord", "keep_room", "reason_of",
]  # fmt: skip

# Reasons of a batch script that exited with 0; the second one is followed by the steps that failed inside it.
SCRIPT_DONE = "the script exited with 0"
FAILED_INSIDE = f"{SCRIPT_DONE}, but "
OWN_REQUEUE = "the script requeued its job"
_SIGKILL_GUESS = "(out of memory?)"  # the guard process sees that SIGKILL ended a rank, but not who sent it
_START_KEYS = ("start", "job_id", "host", "launcher", "nodes", "ranks", "time", "halvings")
_END_KEYS = (
    "cause", "next", "final", "state", "exit_code", "reason", "decision", "rank", "host", "fix", "last_lines", "step",
    "seconds", "time", "symptom", "evidence", "changed_files", "new_files", "begun", "usage",
)  # fmt: skip
FILES_NAMED = 3  # names of files in a message


@dataclass(frozen=True)
class MatchedFiles:
    """`matched_files.json`: the files that `restart.progress` matched at the end of an attempt, below `folder`.

    `new` are names that no earlier attempt had. A file of an earlier attempt may only have been rewritten, by a program
    that does not continue from it, so it does not prove progress.

    `before` are other names that were there when the attempt started, and that no earlier attempt lists: all of them for
    the first one. Of files that are not new, only the first names are listed, so that the records do not grow.
    """

    pattern: str
    folder: str
    new: list[str]
    before: list[str]
    rewritten: list[str]
    rewritten_count: int
    unchanged: list[str]
    unchanged_count: int

    @classmethod
    def read(cls, attempt: AttemptDirectory) -> MatchedFiles | None:
        """Read the file of an attempt; None if it has not ended, or if the job has no such pattern.

        Raises:
            DamagedFileError: the file is damaged.
        """
        value = read_json_or_none(attempt.matched_files)
        return cls(**{one.name: value[one.name] for one in fields(cls)}) if value is not None else None

    def write(self, attempt: AttemptDirectory) -> None:
        """Write `matched_files.json`."""
        write_json(attempt.matched_files, asdict(self))

    def __str__(self) -> str:
        kinds = (
            ("new", self.new, len(self.new)),
            ("only rewritten", self.rewritten, self.rewritten_count),
            ("unchanged", self.unchanged, self.unchanged_count),
        )
        matched = [f"{count} {kind} ({_named(names, count)})" for kind, names, count in kinds if count]
        return f"restart.progress = {self.pattern!r} matched " + (", ".join(matched) or f"no file in {self.folder}")


def _named(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:FILES_NAMED]) + (", ..." if count > FILES_NAMED else "")


@dataclass(frozen=True)
class StartRecord:
    """`start.json`: to which start and Slurm job an attempt belongs, and on how many nodes and ranks it runs.

    `halvings` is how often its ranks halved the micro-batch of the job, after attempts that ran out of memory.
    `other_keys` are keys that this version does not know; `write` preserves them.
    """

    start: int
    job_id: str
    nodes: int
    ranks: int
    time: str
    host: str = ""
    launcher: str = ""
    halvings: int = 0
    other_keys: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def read(cls, attempt: AttemptDirectory, *, end: AttemptRecord | None = None) -> StartRecord | None:
        """Read the start record of an attempt, from `exit.json` if its array task is finished; None if not started.

        Pass `exit.json` as `end` if it has been read already.

        Raises:
            DamagedFileError: one of the two files is damaged.
        """
        if (record := cls.read_file(attempt)) is not None:
            return record
        end = end or AttemptRecord.read(attempt)
        return end.begun if end is not None else None

    @classmethod
    def read_file(cls, attempt: AttemptDirectory) -> StartRecord | None:
        """Read `start.json`; return None if there is no such file."""
        value = read_json_or_none(attempt.start_file)
        return cls.from_json(value) if value is not None else None

    def write(self, attempt: AttemptDirectory) -> None:
        """Write `start.json`."""
        write_json(attempt.start_file, self.as_json())

    def as_json(self) -> dict[str, Any]:
        """Return the record as the JSON value of its file."""
        return {**{name: getattr(self, name) for name in _START_KEYS}, **self.other_keys}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StartRecord:
        """Convert the JSON value of `start.json` to a record."""
        known = {name: value[name] for name in _START_KEYS if name in value}
        return cls(**known, other_keys={name: value[name] for name in value if name not in _START_KEYS})


@dataclass(frozen=True)
class AttemptRecord:
    """`exit.json`: why an attempt ended, and what follows.

    `rank` on `host` caused the end; both are None if no single rank did. `evidence` contains (file name, line) pairs
    from the files of the attempt. `begun` and `usage` preserve contents of files that a finished array task removes.
    `seconds` is the unchecked running time, None in old files. `changed_files` is whether files that `restart.progress`
    matches changed, None without such a pattern; `new_files` is whether one has a new name. `other_keys` are keys that this version does not know;
    `write` preserves them.
    """

    cause: Cause
    next: Next
    final: bool
    state: RunState
    exit_code: int
    reason: str
    decision: str
    rank: int | None = None
    host: str | None = None
    fix: str = ""
    last_lines: Sequence[str] = ()
    step: int | None = None
    seconds: float | None = None
    time: str = ""
    symptom: str = ""
    evidence: Sequence[tuple[str, str]] = ()
    begun: StartRecord | None = None
    usage: list[dict[str, Any]] = field(default_factory=list)
    changed_files: bool | None = None
    new_files: bool | None = None
    other_keys: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def read(cls, attempt: AttemptDirectory) -> AttemptRecord | None:
        """Read `exit.json` of an attempt; return None if the attempt has not ended.

        Raises:
            DamagedFileError: the file is damaged.
        """
        value = read_json_or_none(attempt.exit_file)
        if value is None:
            return None
        known = {name: value[name] for name in _END_KEYS if name in value}
        kinds = {"cause": Cause(known["cause"]), "next": Next(known["next"]), "state": RunState(known["state"])}
        known |= {"symptom": str(known.get("symptom") or ""), "evidence": known.get("evidence") or ()}
        if (begun := known.pop("begun", None)) is not None:
            try:
                known["begun"] = StartRecord.from_json(dict(begun))
            except (TypeError, ValueError) as error:
                raise DamagedFileError(
                    f"begun = {begun!r:.80} is not valid: another version of toolkit wrote this file, or it is damaged",
                    where=str(attempt.exit_file),
                    fix="restore the file or start a new run",
                ) from error
        return cls(**known | kinds, other_keys={name: value[name] for name in value if name not in _END_KEYS})

    def write(self, attempt: AttemptDirectory) -> None:
        """Write `exit.json`, using the reserved space of the attempt if the disk is full.

        Raises:
            OSError: the file cannot be written.
        """
        write_exit(attempt, self.as_json())

    def as_json(self) -> dict[str, Any]:
        """Return the record as the JSON value of its file."""
        value = {
            name: getattr(self, name)
            for name in _END_KEYS
            if name not in ("symptom", "evidence", "begun", "usage", "changed_files", "new_files")
        }
        files = {"changed_files": self.changed_files, "new_files": self.new_files}
        value |= {name: changed for name, changed in files.items() if changed is not None}
        if self.symptom:  # it is "" if the next start wrote the record
            value |= {"symptom": self.symptom, "evidence": list(self.evidence)}
        if self.begun is not None:
            value |= {"begun": self.begun.as_json(), "usage": self.usage}
        return {**value, "last_lines": list(self.last_lines), **self.other_keys}

    def ending_the_run(self, decision: str, **changed: Any) -> AttemptRecord:
        """Return a copy of the record in which no attempt follows, for the reason `decision`."""
        return replace(self, next=Next.END, final=True, decision=decision, **changed)

    @property
    def culprit(self) -> str:
        """`rank 3 on node2`, the rank that caused the end; "" if no single rank did."""
        return f"rank {self.rank} on {self.host}" if self.rank is not None else ""

    def blaming(self, reason: str) -> str:
        """Prefix a reason with the rank that caused the end: `rank 3 on node2: exit code 1`."""
        return f"{self.culprit}: {reason}" if self.culprit else reason


def reason_of(attempt: AttemptDirectory, end: AttemptRecord) -> str:
    """Return why an attempt ended. If `toolkit rehearse` killed a rank, it does not suggest out-of-memory."""
    if _SIGKILL_GUESS not in end.reason:
        return end.reason
    note = read_json_or_none(attempt.rehearsed)
    is_rehearsal = note is not None and str(note["failure"]).startswith("kill-")
    return end.reason.replace(_SIGKILL_GUESS, "(by a rehearsal)") if is_rehearsal else end.reason


RESERVE_BYTES = 1 << 15  # this is enough for exit.json with its last lines, the last event, and end.json of the start


def keep_room(attempt: AttemptDirectory) -> None:
    """Reserve disk space for `exit.json`: writes random bytes, because some file systems compress or allocate late.

    Raises:
        OSError: there is not enough free space.
    """
    write_bytes(attempt.reserve, os.urandom(RESERVE_BYTES))


def write_exit(attempt: AttemptDirectory, record: Mapping[str, object]) -> None:
    """Write `exit.json`, using the reserved space if the disk is full.

    Raises:
        OSError: the file cannot be written even in the reserved space.
    """
    try:
        write_json(attempt.exit_file, record)
    except OSError as error:
        if not is_unwritable(error) or not attempt.reserve.exists():
            raise
        attempt.reserve.unlink()
        write_json(attempt.exit_file, record)
    attempt.reserve.unlink(missing_ok=True)

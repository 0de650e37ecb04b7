"""Search the logs and stacks of all ranks for symptoms that no rank reports as its error, and complete their fixes."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, counted
from toolkit.rundir.attempt_records import StartRecord
from toolkit.rundir.files import read_json_or_none, tail_text
from toolkit.rundir.layout import AttemptDirectory, rank_of
from toolkit.rundir.rank_logs import labelled_rank
from toolkit.supervise.symptoms import (
    COMPILE_LOCK,
    MPI_IN_CHILD,
    RENDEZVOUS,
    STEP_FAILED,
    Symptom,
    match_symptom,
    pattern_of,
)
from toolkit.terminal.talk import clean

__all__ = ["HANGS", "RankEvidence", "complete_fix", "find_in_ranks"]

HANGS = (MPI_IN_CHILD, COMPILE_LOCK)  # a rank may wait forever, and then no rank reports an error
LINES_SEARCHED = 200  # at the end of each log
_LOCKS_SHOWN = 3
_ENDPOINT = re.compile(r"""--(?:rdzv[-_]endpoint|master[-_]addr)[= ]+["']?([^\s"']+)""")
_EXITS_AT_ERRORS = re.compile(r"^\s*set +-\w*e|^#!.* -\w*e", re.MULTILINE)
_CONNECTING = re.compile(r"trying to connect to \((\S+), (\d+)\)")


@dataclass(frozen=True)
class RankEvidence:
    """A symptom in a file of the attempt; `rank` wrote the line, or is None if the file does not tell."""

    symptom: Symptom
    rank: int | None
    file: str
    line: str


def find_in_ranks(attempt: AttemptDirectory, symptoms: Sequence[Symptom]) -> RankEvidence | None:
    """Return the first of these symptoms in the ends of the logs and in the stacks of ranks; None if there is none."""
    wanted = pattern_of(symptoms)
    for path in _files(attempt):
        # Most logs of a large job have no such line; one search of the whole end is much faster than one per line.
        tail = clean("\n".join(tail_text(path, LINES_SEARCHED)))
        if not wanted.search(tail):
            continue
        raw = tail.split("\n")
        is_of_node = path.name.startswith("node-")
        lines = [line.partition("] ")[2] for line in raw] if is_of_node else raw
        match = match_symptom(lines)
        if match is not None and match.symptom in symptoms:
            written = next(line for line in raw if match.line in line)
            rank = labelled_rank(written) if is_of_node else rank_of(path)
            return RankEvidence(match.symptom, rank, f"{path.parent.name}/{path.name}", match.line)
    return None


def _files(attempt: AttemptDirectory) -> Iterator[Path]:
    yield from sorted(attempt.logs.glob("rank-*.log"))
    yield from sorted(attempt.logs.glob("node-*.log"))
    yield from sorted(attempt.errors.glob("rank-*.stack"))


def complete_fix(symptom: Symptom, attempt: AttemptDirectory, lines: Sequence[str] = ()) -> str:
    """Return the fix of a symptom, with the lock files, or the endpoint and the number of nodes, of this attempt."""
    is_other = _EXITS_AT_ERRORS.search(_script(attempt)) if symptom is STEP_FAILED else _is_program(attempt)
    fix = ((is_other and symptom.script_fix) or symptom.fix).format(run=attempt.run.run_id)
    if symptom is COMPILE_LOCK:
        return f"{fix}: {', '.join(_locks(attempt)) or '`lock` in its folder below TORCH_EXTENSIONS_DIR'}"
    if symptom is RENDEZVOUS:
        begun = StartRecord.read(attempt)
        nodes = f"; this job has {counted(begun.nodes, 'node')}" if begun is not None else ""
        endpoint = _endpoint(attempt, lines)
        return fix + nodes + (f", and the endpoint is {endpoint}" if endpoint else "")
    return fix


def _endpoint(attempt: AttemptDirectory, lines: Sequence[str]) -> str:
    """Return the endpoint of torchrun from its messages, else as the script or the entry has it; "" if unknown."""
    if tried := _CONNECTING.search("\n".join(lines)):
        return f"{tried[1]}:{tried[2]}"
    entry = (_job(attempt).get("job") or {}).get("entry") or []
    given = _ENDPOINT.search(_script(attempt) or " ".join(entry))
    return given[1] if given else ""


def _script(attempt: AttemptDirectory) -> str:
    """Return the batch script of the run; "" if it has none."""
    script = attempt.run.batch_script
    return script.read_text("utf-8", "replace") if script.exists() else ""


def _is_program(attempt: AttemptDirectory) -> bool:
    """Return whether the program is a script or executable, without toolkit's training loop."""
    entry = (_job(attempt).get("job") or {}).get("entry", "file.py:main")
    return attempt.run.batch_script.exists() or not (isinstance(entry, str) and ":" in entry)


def _locks(attempt: AttemptDirectory) -> list[str]:
    """Return the oldest lock files of torch.utils.cpp_extension that this host sees."""
    chosen = (_job(attempt).get("env") or {}).get("vars") or {}
    default = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/torch_extensions"
    folder = chosen.get("TORCH_EXTENSIONS_DIR") or os.environ.get("TORCH_EXTENSIONS_DIR") or default
    # The default folder has a folder for each version of Python and CUDA in between.
    found = (path for depth in ("*/lock", "*/*/lock") for path in Path(str(folder)).expanduser().glob(depth))
    return list(map(str, sorted(found, key=lambda path: path.lstat().st_mtime)[:_LOCKS_SHOWN]))


def _job(attempt: AttemptDirectory) -> Mapping[str, Any]:
    """Return the resolved job of the attempt's start; {} if it cannot be read, as the fix only lacks a detail then."""
    begun = StartRecord.read(attempt)
    try:
        return (begun and read_json_or_none(attempt.run.start(begun.start) / "job.json")) or {}
    except ToolkitError:
        return {}

"""The required keys of a run's JSON files, so that a damaged file, or another version's, is rejected when it is read.

docs/contract.md describes each file in full; this table contains the keys that readers rely on. Further keys are valid.
"""

from __future__ import annotations

import re
from typing import Any, get_args

from toolkit.errors import DamagedFileError, ToolkitError
from toolkit.rundir.states import Cause, Next, RunState

_USAGE = {
    "first_rank": int, "ranks": int, "cpu_s": float | int, "cpus_peak": float | int, "memory_peak_bytes": int,
    "memory_mean_bytes": int, "gpus": list | None, "time": str,
}  # fmt: skip
# The end of a file's path, and its keys with their types; an enumeration means its values.
_SHAPES: tuple[tuple[re.Pattern[str], dict[str, Any]], ...] = (
    (re.compile(r"/record\.json"), {"job": dict, "host": str}),
    (re.compile(r"/resumed-\d+\.json"), {"job": dict}),
    (re.compile(r"/code(-\d+)?\.json"), {"source": str, "files": dict, "linked": list[str]}),
    (re.compile(r"/submitted-\d+\.json"), {"job_id": str}),
    (re.compile(r"/sweep\.json"), {"keys": list[str], "tasks": list[dict]}),
    (re.compile(r"/\.bad-nodes/[^/]+/[^/]+\.json"), {"node": str, "reason": str, "run_id": str, "noted": float, "expires": float}),
    (
        re.compile(r"/starts/\d+/claim\.json"),
        {"start": int, "job_id": str, "host": str, "pid": int, "process_started": int},
    ),
    (re.compile(r"/starts/\d+/end\.json"), {"state": str, "exit_code": int, "time": str}),
    (re.compile(r"/starts/\d+/job\.json"), {"job": dict}),
    (
        re.compile(r"/attempts/\d+/start\.json"),
        {"start": int, "job_id": str, "nodes": int, "ranks": int, "time": str},
    ),
    (
        re.compile(r"/attempts/\d+/exit\.json"),
        {"cause": Cause, "next": Next, "final": bool, "state": RunState, "exit_code": int, "reason": str, "decision": str,
         "rank": int | None, "host": str | None, "fix": str, "last_lines": list[str], "step": int | None, "time": str},
    ),
    (re.compile(r"/attempts/\d+/rehearsed\.json"), {"failure": str, "done": str, "time": str}),
    (re.compile(r"/attempts/\d+/heartbeat"), {"step": int}),
    (re.compile(r"/attempts/\d+/usage/rank-\d+\.json"), _USAGE),
    (re.compile(r"/attempts/\d+/events\.jsonl"), {"event": str, "time": str}),
    (re.compile(r"/attempts/\d+/ranks/rank-\d+\.json"), {"rank": int, "host": str, "pid": int}),
    (
        re.compile(r"/attempts/\d+/errors/rank-\d+\.json"),
        {"rank": int, "host": str, "kind": str, "reason": str, "exit_code": int, "time": str},
    ),
)  # fmt: skip
LARGEST = 2**63 - 1


def check_record(value: Any, path: str) -> None:
    """Check the contents of the file `path` of a run.

    Raises:
        ToolkitError: they are not valid for such a file.
    """
    keys = next((keys for pattern, keys in _SHAPES if pattern.search(path)), None)
    if keys is not None:
        _check(value, keys, path)


def check_kept_usage(value: Any, path: str) -> None:
    """Check the `usage` in the file `path`, an `exit.json`.

    Raises:
        ToolkitError: it is not a list of samples.
    """
    if not isinstance(value, list):
        raise _refusal(path, f"usage = {value!r:.80} is not valid")
    for one in value:
        _check(one, _USAGE, path)


def _check(value: Any, keys: dict[str, Any], path: str) -> None:
    if not isinstance(value, dict):
        raise _refusal(path, "expected a JSON object")
    for name, kind in keys.items():
        if name not in value:
            raise _refusal(path, f"missing key {name!r}")
        if not _fits(value[name], kind):
            raise _refusal(path, f"{name} = {value[name]!r:.80} is not valid")


def _refusal(path: str, problem: str) -> ToolkitError:
    return DamagedFileError(
        f"{problem}: another version of toolkit wrote it, or it is damaged",
        where=path,
        fix="restore the file or start a new run",
    )


def _fits(value: Any, kind: Any) -> bool:
    if kind in (Cause, Next, RunState):
        return isinstance(value, str) and value in {member.value for member in kind}
    if kind in (list[str], list[dict]):
        (member,) = get_args(kind)
        return isinstance(value, list) and all(isinstance(one, member) for one in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and not (isinstance(value, int) and abs(value) > LARGEST)

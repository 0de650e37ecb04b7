"""Rank 0 writes the return value of the entry to result.json, for `toolkit.Run.result`. Standard library only."""

import json
import math
from typing import Any

from toolkit.rundir.files import is_unwritable, utc_now, write_text
from toolkit.rundir.layout import RunDirectory
from toolkit.terminal.talk import say

__all__ = ["reason_not_json", "store_result"]

MOST_BYTES = 1 << 20
DEEPEST = 100


def store_result(run: RunDirectory, value: Any, attempt: int) -> None:
    """Write the result of a run or task. If it is not a JSON value, log the reason instead."""
    if value is None:
        run.result.unlink(missing_ok=True)  # remove the result of an earlier attempt
        return
    reason = reason_not_json(value)
    if not reason:
        content = json.dumps({"schema": 1, "time": utc_now(), "attempt": attempt, "value": value}) + "\n"
        if len(content) > MOST_BYTES:
            reason = f"expected at most {MOST_BYTES} bytes of JSON, got {len(content)}"
    if reason:
        run.result.unlink(missing_ok=True)
        say(f"the result was not stored: {reason}")
        return
    try:
        write_text(run.result, content, mode=0o600)
    except OSError as error:
        if not is_unwritable(error):
            raise
        say(f"the result was not stored: cannot write {run.result}: {error.strerror}")


def reason_not_json(value: Any, depth: int = 0) -> str:
    """Return why a value cannot be stored as JSON; "" for None, bools, finite numbers, strings, lists and dictionaries."""
    if depth > DEEPEST:
        return f"expected at most {DEEPEST} levels of lists and dictionaries, got more"
    if value is None or type(value) in (bool, int):
        return ""
    if type(value) is float:
        return "" if math.isfinite(value) else f"expected a finite number, got {value}"
    if type(value) is str:
        return ""
    if type(value) in (list, tuple):
        return next(filter(None, (reason_not_json(one, depth + 1) for one in value)), "")
    if type(value) is dict:
        bad = next((key for key in value if type(key) is not str), None)
        if bad is not None:
            return f"expected strings as the keys of a dictionary, got {bad!r}"
        return next(filter(None, (reason_not_json(one, depth + 1) for one in value.values())), "")
    return f"expected a JSON value, got {type(value).__name__}"

"""The forms of a run's name: every form of a job id that Slurm prints, its own id or a prefix of it, `last`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from toolkit.errors import ToolkitError

FORMS = (
    "RUN is `last`, a run id or its prefix (20261120-14), a path, or a job id as Slurm prints it: "
    "123, 123_4 (a task), 123.0 (a step), 123+1, 123_[0-3], 123;cluster; RUN_4 and last_4 are task 4"
)

# A step is 123.0, 123.batch and so on; squeue prints the pending tasks of an array as 123_[5-9%2], and of many 123_[5-9,...].
_JOB_ID = re.compile(
    r"(?P<job>\d+|local-\d+)(?:_(?P<task>\d+)|(?P<part>\+\d+|_\[[\d,:.%-]+\]))?(?P<step>\.\w+)?(?:;(?P<cluster>[\w.-]+))?"
)
# Digits alone are a job id, so a run id needs at least its day and the dash.
_RUN_ID = re.compile(r"(?P<run>last|(?:[^/]+/)?\d{8}-[\da-f-]*)(?:_(?P<task>\d+)(?P<step>\.\w+)?)?")


@dataclass(frozen=True)
class NameParts:
    """The parts of a typed name. `job_id` is set for a job, `run` otherwise; `part` follows the job or task, as `.0` or `+1`."""

    run: str = ""
    job_id: str = ""
    task: int | None = None
    part: str = ""
    cluster: str = ""


def parse_run_name(text: str) -> NameParts | None:
    """The parts of a name; None if it has no valid form."""
    if match := _JOB_ID.fullmatch(text):
        part = (match["part"] or "") + (match["step"] or "")
        return NameParts(job_id=match["job"], task=_number(match["task"]), part=part, cluster=match["cluster"] or "")
    if match := _RUN_ID.fullmatch(text):
        return NameParts(run=match["run"], task=_number(match["task"]), part=match["step"] or "")
    return None


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def refuse_part(text: str, verb: str) -> None:
    """Reject a name of less than a run or a task: applied to the whole of it, `verb` would do more than intended.

    Raises:
        ToolkitError: it names a step, a component, or some tasks of a job.
    """
    name = parse_run_name(text)
    if name is None or not name.part:
        return
    part = {"+": "one component", "_": "some tasks", ".": "one step"}[name.part[0]]
    fix = f"use {text.partition(name.part)[0]}"
    if name.part[0] == "_":
        fix += f", or each task as {name.job_id}_4"
    raise ToolkitError(f"names {part} of a job, but {verb} needs a run or one task", where=text, fix=fix)

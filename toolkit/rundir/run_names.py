"""How a run may be named: in every form in which Slurm prints a job id, by its own id or the beginning of it, as `last`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from toolkit.errors import ToolkitError

FORMS = (
    "RUN is `last`, a run id or its beginning (20261120-14), a path, or a job id as Slurm prints it: "
    "123, 123_4 (a task), 123.0 (a step), 123+1, 123_[0-3], 123;cluster; RUN_4 and last_4 are task 4"
)

# A step is 123.0, 123.batch and so on; squeue calls the waiting tasks of an array 123_[5-9%2], and of many 123_[5-9,...].
_JOB_ID = re.compile(
    r"(?P<job>\d+|local-\d+)(?:_(?P<task>\d+)|(?P<part>\+\d+|_\[[\d,:.%-]+\]))?(?P<step>\.\w+)?(?:;(?P<cluster>[\w.-]+))?"
)
# Digits alone are a job id, so a run id has its day and the dash at least.
_RUN_ID = re.compile(r"(?P<run>last|(?:[^/]+/)?\d{8}-[\da-f-]*)(?:_(?P<task>\d+)(?P<step>\.\w+)?)?")


@dataclass(frozen=True)
class NameParts:
    """What a user typed, taken apart. `job_id` is of a job, `run` else; `part` is of the job or task, as `.0` or `+1`."""

    run: str = ""
    job_id: str = ""
    task: int | None = None
    part: str = ""
    cluster: str = ""


def parse_run_name(text: str) -> NameParts | None:
    """Take a name apart; None for what has no form of one."""
    if match := _JOB_ID.fullmatch(text):
        part = (match["part"] or "") + (match["step"] or "")
        return NameParts(job_id=match["job"], task=_number(match["task"]), part=part, cluster=match["cluster"] or "")
    if match := _RUN_ID.fullmatch(text):
        return NameParts(run=match["run"], task=_number(match["task"]), part=match["step"] or "")
    return None


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def refuse_part(text: str, verb: str) -> None:
    """Refuse what names less than a run or a task: done to all of it, `verb` would do more than was meant.

    Raises:
        ToolkitError: it names a step, a component, or some tasks of a job.
    """
    name = parse_run_name(text)
    if name is None or not name.part:
        return
    what = {"+": "one component", "_": "some tasks", ".": "one step"}[name.part[0]]
    fix = f"give {text.partition(name.part)[0]}"
    if name.part[0] == "_":
        fix += f", or each task as {name.job_id}_4"
    raise ToolkitError(f"names {what} of a job, and {verb} is for a run or one task", where=text, fix=fix)

"""The job of one task of a sweep: the script's job, overridden by the task's own values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import OwnFailureError


def job_of_task(job: Mapping[str, Any], task: int | None) -> Mapping[str, Any]:
    """The job without the values of a sweep's other tasks; a job without a sweep unchanged.

    Raises:
        OwnFailureError: this is not one of the sweep's tasks.
    """
    if "sweep" not in job:
        return job
    values = job["sweep"].get(str(task))
    if values is None:
        raise OwnFailureError(
            f"the script has values for {len(job['sweep'])} tasks of an array, but not for task {task}",
            fix="submit the script unchanged, with its own --array",
        )
    own = {name: table for name, table in job.items() if name != "sweep"}
    for key, value in values.items():
        table, _, name = key.partition(".")
        own[table] = {**own[table], name: value}
    return own

"""`record.json`: what was submitted, from which code, with which tools; enough to run it again."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from toolkit.config.resolved import ResolvedJob
from toolkit.config.secrets import shown_words
from toolkit.rundir.files import utc_now
from toolkit.runs.record.code_snapshot import Snapshot
from toolkit.runs.record.repository import code_state
from toolkit.version import VERSION

_ENVIRONMENT = ("CONDA_DEFAULT_ENV", "HOSTNAME", "LANG", "LOADEDMODULES", "USER", "VIRTUAL_ENV")


def make_record(job: ResolvedJob, *, command: list[str], code: dict[str, Any], rerun_of: str = "") -> dict[str, Any]:
    """The record of a new run; the environment by allow-list, so that no secret is kept."""
    return {
        "schema": 1,
        "created": utc_now(),
        "command": shown_words(command),
        "working_directory": str(Path.cwd()),
        "toolkit": VERSION,
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "host": platform.node(),
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "code": code,
        "job": job.model_dump(mode="json", by_alias=True),
        **({"rerun_of": rerun_of} if rerun_of else {}),
    }


def recorded_code(job: ResolvedJob, snapshot: Snapshot | str) -> dict[str, Any]:
    """The state of the job's repository, and the copy of its folder, or why none was taken."""
    state = code_state(job.job_directory)
    if isinstance(snapshot, str):
        return state | {"snapshot_left_out": snapshot}
    assert job.code_directory is not None
    return state | {"snapshot": snapshot.summary(job.code_directory.name)}

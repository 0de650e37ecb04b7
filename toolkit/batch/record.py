"""`record.json`: what was submitted, from which code, with which tools; enough to run it again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import toolkit
from toolkit.config.resolved import ResolvedJob
from toolkit.rundir.files import utc_now

DIFF_LIMIT_BYTES = 200_000
_ENVIRONMENT = ("CONDA_DEFAULT_ENV", "HOSTNAME", "LANG", "LOADEDMODULES", "USER", "VIRTUAL_ENV")


def make_record(job: ResolvedJob, *, command: list[str]) -> dict[str, Any]:
    """The record of a new run; the environment by allow-list, so that no secret is kept."""
    return {
        "schema": 1,
        "created": utc_now(),
        "command": command,
        "working_directory": str(Path.cwd()),
        "toolkit": toolkit.__version__,
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "host": platform.node(),
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "code": code_state(job.job_directory),
        "job": job.model_dump(mode="json", by_alias=True),
    }


def code_state(folder: Path) -> dict[str, Any]:
    """Commit and uncommitted changes of the job's repository; {} outside one or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    state: dict[str, Any] = {"commit": commit.strip()}
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff")
    if diff is None:  # git did not answer in time; nothing is claimed
        return state
    state["clean"] = not diff
    if len(diff.encode()) > DIFF_LIMIT_BYTES:
        state["diff_left_out"] = f"{len(diff.encode())} bytes, more than {DIFF_LIMIT_BYTES}"
    elif diff:
        state["diff"] = diff
    return state


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None

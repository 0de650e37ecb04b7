"""Here and now: the rendered script as a child of this process, its ranks' output on this terminal."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from toolkit.batch.logs import FOLLOW_PERIOD_S, LogReader
from toolkit.rundir.files import utc_now, write_json
from toolkit.rundir.layout import RunDirectory

MOST_SHOWN_RANKS = 64


def start_here(run: RunDirectory) -> subprocess.Popen[bytes]:
    """Start the supervisor in a session of its own, so that the terminal's Ctrl-C reaches it only through us."""
    inside = bool(os.environ.get("SLURM_JOB_ID"))
    marker = {"TOOLKIT_IN_ALLOCATION": "1"} if inside else {"TOOLKIT_LOCAL": "1"}
    job_id = os.environ.get("SLURM_JOB_ID", "local")
    with (run.path / f"slurm-{job_id}.out").open("ab") as log:
        process = subprocess.Popen(
            ["bash", str(run.script(0))], env={**os.environ, **marker}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    write_json(
        run.path / "submitted-000.json",
        {"job_id": job_id if inside else f"local-{process.pid}", "start": 0, "time": utc_now()},
    )
    return process


def show_output(
    run: RunDirectory, supervisor: subprocess.Popen[bytes], write: Callable[[str], object]
) -> int:
    """Print what the ranks print until the supervisor ends; returns its exit code. Several ranks are numbered."""
    reader = LogReader(_rank_label)
    while True:
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = supervisor.wait(FOLLOW_PERIOD_S)
        for number in run.attempt_numbers():
            for line in reader.read(_shown(run, number)):
                write(line)
        if code is not None:
            return code


def _shown(run: RunDirectory, attempt: int) -> list[Path]:
    paths = sorted(
        run.attempt(attempt).logs.glob("rank-*.log"), key=lambda path: int(path.stem.split("-")[1])
    )
    return paths if len(paths) <= MOST_SHOWN_RANKS else paths[:1]


def _rank_label(path: Path) -> str:
    return f"[{path.stem.removeprefix('rank-')}] "

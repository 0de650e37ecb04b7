"""Here and now: the rendered script as a child of this process, its ranks' output on this terminal."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from toolkit.batch.executors import start_local
from toolkit.batch.logs import FOLLOW_PERIOD_S, LogReader, rank_label, rank_logs
from toolkit.batch.restarts import RestartNews
from toolkit.batch.submission import uses_slurm
from toolkit.config.resolved import ResolvedJob
from toolkit.rundir.files import read_json_or_none, utc_now, write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory

MOST_SHOWN_RANKS = 64


def start_here(run: RunDirectory, job: ResolvedJob) -> subprocess.Popen[bytes]:
    """Start the supervisor in a session of its own, so that the terminal's Ctrl-C reaches it only through us."""
    if uses_slurm(job) and os.environ.get("SLURM_JOB_ID"):
        process, job_id = _start_in_allocation(run), os.environ["SLURM_JOB_ID"]
    else:
        process = start_local(run, run.script(0))
        job_id = f"local-{process.pid}"
    submitted = {"job_id": job_id, "start": 0, "time": utc_now(), "interactive": True}
    write_json(run.path / "submitted-000.json", submitted)
    return process


def _start_in_allocation(run: RunDirectory) -> subprocess.Popen[bytes]:
    path = run.path / f"slurm-{os.environ['SLURM_JOB_ID']}.out"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            ["bash", str(run.script(0))], env={**os.environ, "TOOLKIT_IN_ALLOCATION": "1"}, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(log)


def show_output(
    run: RunDirectory,
    supervisor: subprocess.Popen[bytes],
    write: Callable[[str], object],
    say: Callable[[str], object],
) -> None:
    """Print what the ranks print until the supervisor ends. The lines of an attempt of several ranks are numbered.

    `write` takes the ranks' lines, `say` what is told of restarts.
    Of more than 64 ranks only the first is shown.
    """
    reader, restarts = LogReader(_label), RestartNews(run)
    ended = False
    while not ended:
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(FOLLOW_PERIOD_S)
            ended = True
        for number in run.attempt_numbers():
            attempt = run.attempt(number)
            shown = rank_logs(attempt)[: None if _ranks_of(attempt) <= MOST_SHOWN_RANKS else 1]
            for line in reader.read(shown, to_the_end=ended):
                write(line)
        for line in restarts.new():
            say(line)


def _label(log: Path) -> str:
    return rank_label(log) if _ranks_of(AttemptDirectory(log.parents[1])) > 1 else ""


def _ranks_of(attempt: AttemptDirectory) -> int:
    """As the supervisor wrote before it started them; which logs are there says nothing."""
    return int((read_json_or_none(attempt.start_file) or {"ranks": 1})["ranks"])

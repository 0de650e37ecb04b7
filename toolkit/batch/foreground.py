"""Here and now: the rendered script as a child of this process, its ranks' output on this terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from toolkit.batch.allocation import environment_of_allocation
from toolkit.batch.executors import ignore_interrupts, start_local
from toolkit.batch.logs import FOLLOW_PERIOD_S, LogReader, rank_label, rank_logs
from toolkit.batch.restarts import RestartNews
from toolkit.batch.submission import uses_slurm
from toolkit.config.resolved import ResolvedJob
from toolkit.rundir.files import open_append, read_json_or_none, utc_now, write_json, write_text
from toolkit.rundir.layout import AttemptDirectory, RunDirectory

MOST_SHOWN_RANKS = 64


def start_here(run: RunDirectory, job: ResolvedJob, start: int = 0) -> subprocess.Popen[bytes]:
    """Start the supervisor of a start in a session of its own, so that the terminal's Ctrl-C reaches it only through us."""
    if uses_slurm(job) and os.environ.get("SLURM_JOB_ID"):
        process, job_id = _start_in_allocation(run, start), os.environ["SLURM_JOB_ID"]
    else:
        process = start_local(run, run.script(start))
        job_id = f"local-{process.pid}"
    submitted = {"job_id": job_id, "start": start, "time": utc_now(), "interactive": True}
    write_json(run.path / f"submitted-{start:03}.json", submitted)
    return process


def _start_in_allocation(run: RunDirectory, start: int) -> subprocess.Popen[bytes]:
    log = open_append(run.path / f"slurm-{os.environ['SLURM_JOB_ID']}.out")
    try:
        return subprocess.Popen(
            ["bash", str(run.script(start))],
            env={**environment_of_allocation(os.environ), "TOOLKIT_IN_ALLOCATION": "1"},
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=ignore_interrupts,
        )  # fmt: skip
    finally:
        os.close(log)


@dataclass
class Interrupts:
    """While a run lives in the foreground, as a context: Ctrl-C asks it to save and end; twice ends it at once.

    `supervisor` is who hears of it, once there is one.
    """

    run: RunDirectory
    supervisor: subprocess.Popen[bytes] | None = None
    asked: bool = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._forward)
        return self

    def __exit__(self, *_error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _forward(self, _number: int, _frame: FrameType | None) -> None:
        if self.supervisor is not None:
            with suppress(ProcessLookupError):
                # Before its first start it does not hear yet, and has nothing to lose.
                if self.asked and not self.run.start_numbers():
                    os.killpg(self.supervisor.pid, signal.SIGKILL)
                os.kill(self.supervisor.pid, signal.SIGINT)
        if not self.asked:
            self.asked = True
            # For one that does not hear yet.
            write_text(self.run.control / "stop", utc_now() + "\n")
            print("\ntoolkit: asked the run to save and end; Ctrl-C again ends it at once", file=sys.stderr)  # noqa: T201


def show_output(
    run: RunDirectory,
    supervisor: subprocess.Popen[bytes],
    write: Callable[[str], object],
    say: Callable[[str], object],
    *,
    first_attempt: int = 0,
) -> None:
    """Print what the ranks print until the supervisor ends. The lines of an attempt of several ranks are numbered.

    `write` takes the ranks' lines, `say` what is told of restarts. Attempts before `first_attempt` are not shown.
    Of more than 64 ranks only the first is shown.
    """
    reader, restarts = LogReader(_label), RestartNews(run)
    ended = False
    while not ended:
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(FOLLOW_PERIOD_S)
            ended = True
        for number in run.attempt_numbers():
            if number < first_attempt:
                continue
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

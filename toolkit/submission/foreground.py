"""The foreground: the rendered script as a child of this process, its ranks' output on this terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from toolkit.config.resolved import ResolvedJob
from toolkit.rundir.attempt_records import RESERVE_BYTES, StartRecord
from toolkit.rundir.files import open_append, utc_now, why_unwritable, write_json, write_text
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.rank_logs import find_log, is_shared
from toolkit.runs.logs.log_choice import LogPart, logs_of_attempt
from toolkit.runs.logs.logs import FOLLOW_PERIOD_S, LogReader
from toolkit.runs.record.job import uses_slurm
from toolkit.runs.status.restarts import RestartNews
from toolkit.submission.allocation import environment_of_allocation
from toolkit.submission.submitit_executors import ignore_interrupts, start_local

__all__ = ["Interrupts", "show_output", "start_here"]

MOST_SHOWN_RANKS = 64
# With less space than this, further output of ranks is lost; only this reserve is left for the attempt's end.
LINES_BYTES = (1 << 14) + RESERVE_BYTES
ROOM_PERIOD_S = 3.0  # between two checks of the free space


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
    """A context while a run is in the foreground: Ctrl-C asks it to save and end; a second one kills it.

    `supervisor` gets the signal, once there is one.
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
                # Before its first start it does not handle signals yet, and has nothing to lose.
                if self.asked and not self.run.start_numbers():
                    os.killpg(self.supervisor.pid, signal.SIGKILL)
                os.kill(self.supervisor.pid, signal.SIGINT)
        if not self.asked:
            self.asked = True
            # For a supervisor that does not handle signals yet.
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

    `write` takes the ranks' lines with their newlines, `say` what is told of restarts and, once, of a
    full disk: the supervisor's own words of it lie on that disk. Attempts before `first_attempt` are not shown.
    Of more than 64 ranks only the first is shown.
    """
    reader, restarts = LogReader(), RestartNews(run)
    ended, is_told_full, tried_at = False, False, time.monotonic()
    while not ended:
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(FOLLOW_PERIOD_S)
            ended = True
        if not is_told_full and (ended or time.monotonic() - tried_at > ROOM_PERIOD_S):
            tried_at = time.monotonic()
            if full := why_unwritable(run.path, LINES_BYTES):
                is_told_full = True
                say(f"toolkit: {run.path} cannot be written ({full}): what ranks print is lost. Fix: free space there")
        for number in run.attempt_numbers():
            if number < first_attempt:
                continue
            for line in reader.read(_shown_logs(run.attempt(number)), to_the_end=ended):
                write(line)
        for line in restarts.new():
            say(line)


def _shown_logs(attempt: AttemptDirectory) -> list[LogPart]:
    """Return the logs of an attempt's ranks, or that of the first rank if there are too many."""
    ranks = _ranks_of(attempt)
    if ranks <= MOST_SHOWN_RANKS:
        return logs_of_attempt(attempt, labelled=ranks > 1)
    log = find_log(attempt, 0)
    return [LogPart(log, of_several=is_shared(log), ranks={0})] if log.exists() else []


def _ranks_of(attempt: AttemptDirectory) -> int:
    """Return the number of ranks that the supervisor recorded before it started them; the logs may be incomplete."""
    started = StartRecord.read(attempt)
    return started.ranks if started is not None else 1

"""Run a rendered script in the foreground, as a child of this process; the ranks print to this terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from toolkit.config.resolved import ResolvedJob
from toolkit.rundir.attempt_records import RESERVE_BYTES, StartRecord
from toolkit.rundir.files import open_append, utc_now, why_unwritable, write_json, write_text
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.rank_logs import find_log, is_shared
from toolkit.rundir.user_requests import ask_to_stop
from toolkit.runs.logs.log_choice import LogPart, logs_of_attempt
from toolkit.runs.logs.logs import FOLLOW_PERIOD_S, LogReader
from toolkit.runs.record.job import uses_slurm
from toolkit.runs.status.restarts import RestartNews
from toolkit.submission.allocation import environment_of_allocation
from toolkit.submission.submitit_executors import ignore_interrupts, start_local

__all__ = ["Interrupts", "show_output", "start_here"]

MOST_SHOWN_RANKS = 64
# With less free space, rank output is lost: only the records of the attempt may use the reserved space.
LINES_BYTES = (1 << 14) + RESERVE_BYTES
_ASKED = b"\ntoolkit: asked the run to save and exit; press Ctrl-C again to kill it\n"
ROOM_PERIOD_S = 3.0  # time between two checks of the free space


def start_here(run: RunDirectory, job: ResolvedJob, start: int = 0) -> subprocess.Popen[bytes]:
    """Start a run's script in its own session, so that Ctrl-C reaches its supervisor only through us."""
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
    """A context in which the first Ctrl-C requests that the run saves and ends; a second one kills it. SIGTERM cancels it.

    `supervisor` is the process that receives the signal; None until it has been started.
    """

    run: RunDirectory
    supervisor: subprocess.Popen[bytes] | None = None
    asked: bool = False
    _is_cancelled: bool = False
    _before: Any = None
    _before_term: Any = None

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._forward)
        self._before_term = signal.signal(signal.SIGTERM, self._cancel)
        return self

    def __exit__(self, *_error: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        signal.signal(signal.SIGTERM, self._before_term)

    def _cancel(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_cancelled:  # a second signal may interrupt the write of the first
            self._is_cancelled = True
            write_text(self.run.control / "cancel", f"{utc_now()} by SIGTERM to `toolkit run`\n")
        if self.supervisor is not None:
            with suppress(ProcessLookupError):
                os.kill(self.supervisor.pid, number)

    def _forward(self, _number: int, _frame: FrameType | None) -> None:
        if self.supervisor is not None:
            with suppress(ProcessLookupError):
                # Until it records a start, the supervisor handles no signals, and there is nothing to save.
                if self.asked and not self.run.start_numbers():
                    os.killpg(self.supervisor.pid, signal.SIGKILL)
                os.kill(self.supervisor.pid, signal.SIGINT)
        if not self.asked:
            self.asked = True
            # If the supervisor does not handle signals yet, it reads this file later.
            ask_to_stop(self.run, None)
            # Not with print: a handler can run inside a write to stderr, whose buffer refuses a second one.
            with suppress(OSError):
                os.write(2, _ASKED)


def show_output(
    run: RunDirectory,
    supervisor: subprocess.Popen[bytes],
    write: Callable[[str], object],
    say: Callable[[str], object],
    *,
    first_attempt: int = 0,
) -> None:
    """Print the output of the ranks until the supervisor exits; with several ranks, each line names its rank.

    `write` receives the lines of the ranks with their newlines. `say` receives messages about restarts and, once,
    about a full disk, on which the supervisor cannot log. Attempts before `first_attempt` are skipped. With more
    than 64 ranks, only rank 0 is shown.
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
                say(f"toolkit: cannot write to {run.path} ({full}): output of ranks is lost. Fix: free space there")
        for number in run.attempt_numbers():
            if number < first_attempt:
                continue
            for line in reader.read(_shown_logs(run.attempt(number)), to_the_end=ended):
                write(line)
        for line in restarts.new():
            say(line)


def _shown_logs(attempt: AttemptDirectory) -> list[LogPart]:
    """Return the rank logs of an attempt, or only the log of rank 0 if there are too many ranks."""
    ranks = _ranks_of(attempt)
    if ranks <= MOST_SHOWN_RANKS:
        return logs_of_attempt(attempt, labelled=ranks > 1)
    log = find_log(attempt, 0)
    return [LogPart(log, of_several=is_shared(log), ranks={0})] if log.exists() else []


def _ranks_of(attempt: AttemptDirectory) -> int:
    """Return the number of ranks that the supervisor recorded before it started them; some may have no log yet."""
    started = StartRecord.read(attempt)
    return started.ranks if started is not None else 1

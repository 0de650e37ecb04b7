"""Record the steps and metrics that rank 0 of a script or executable prints: heartbeat and ring. Standard library only.

The guard starts a process for this, as a pattern of the user that does not end must not stop the guard.
"""

import math
import os
import select
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.metrics.ring import ABSENT, WIDTH, Ring
from toolkit.metrics.windows import COLUMNS, STEP
from toolkit.rank.log_tail import PERIOD_S, TICK_BYTES, LogTail
from toolkit.rank.step_patterns import StepCount, StepPatterns
from toolkit.rundir.files import open_append, read_json, read_json_or_none, utc_of, write_json
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.rank_logs import find_log
from toolkit.supervise.parent_death import signal_on_parent_death
from toolkit.supervise.process_tree import OWN_PROCESSES
from toolkit.terminal.talk import say_beside

__all__ = ["StepLines", "StepRecords"]

BEAT_PERIOD_S = 1.0
STEP_SPAN_S, RATE_SPAN_S = 2.0, 60.0  # lines are read every 0.1 s, so shorter spans would be inexact
LATE_S = 1.0  # how long a step waits for metrics that follow its line
OTHER_RANK_S = 30.0  # after which the last rank is read, too, if rank 0 has printed no step: Megatron prints there
END_S = 2.0  # maximum wait for the last lines, since the file system may hang
_STEP = COLUMNS.index(STEP)


class StepLines:
    """The process that reads the log. It ends with the guard."""

    def __init__(self, attempt: AttemptDirectory, log: Path, launcher: int = 0) -> None:
        self._attempt, self._log, self._launcher = attempt, log, launcher
        self._process = self._alive = 0

    def start(self) -> None:
        """Start the process; after the fork of the rank, and before the threads of this process."""
        over, self._alive = os.pipe()
        guard = os.getpid()
        self._process = os.fork()
        if self._process:
            os.close(over)
            OWN_PROCESSES.add(self._process)
            return
        try:
            os.close(self._alive)
            signal_on_parent_death(signal.SIGKILL)
            # Launchers signal all processes of a rank. This one ends when the guard closes the pipe.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGVTALRM})
            log = open_append(self._log)  # not the pipe to it, whose end the guard awaits
            os.dup2(log, 1)
            os.dup2(log, 2)
            if os.getppid() == guard:
                self._follow(over)
            os._exit(0)
        except Exception as error:  # noqa: BLE001  the outermost frame of this process
            say_beside(f"steps are no longer read from the output of rank 0: {error!r}")
        finally:
            os._exit(1)

    def note_end(self, pid: int, status: int) -> None:
        """If a child that ended with `status` is the process, and it failed, write that steps are no longer read."""
        if pid != self._process or not status:
            return
        say_beside(f"the process that reads the steps of rank 0 ended with status {status}")
        try:
            beat = read_json_or_none(self._attempt.heartbeat)
            if beat is not None:
                write_json(self._attempt.heartbeat, beat | {"steps_per_s": None}, durable=False)
        except (OSError, ToolkitError) as error:
            say_beside(f"cannot write that steps are no longer read: {error}")

    def finish(self) -> None:
        """Have the last lines of the exited rank read."""
        os.close(self._alive)
        deadline = time.monotonic() + END_S
        with suppress(ChildProcessError):  # the guard has reaped it
            while not os.waitpid(self._process, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    os.kill(self._process, signal.SIGKILL)
                    return  # it may hang in the kernel
                time.sleep(0.01)

    def _follow(self, over: int) -> None:
        path = os.environ.get("TOOLKIT_RESOLVED_JOB")  # ranks without a supervisor have none
        job = read_json(Path(path)) if path else {}
        records = StepRecords(self._attempt, self._log, job.get("observe") or {}, self._launcher)
        is_over = False
        while not is_over and not records.has_other_writer:
            is_over = bool(select.select([over], [], [], PERIOD_S)[0])
            records.read(is_over=is_over)


@dataclass
class _Step:
    """A step that waits for its metrics: when its line was read, and its duration, NaN if that is unknown."""

    number: int
    at_s: float
    seconds: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)


class _Pace:
    """The mean duration of the steps in the last `span_s`, or since the last step if that is longer."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._marks: deque[tuple[float, int]] = deque()

    def add(self, now: float, step: int) -> float:
        """Return the duration after a step; NaN after the first one."""
        while len(self._marks) > 1 and self._marks[1][0] <= now - self._span_s:
            self._marks.popleft()
        self._marks.append((now, step))
        began, first = self._marks[0]
        return max(1e-6, now - began) / (step - first) if step > first else math.nan


class StepRecords:
    """What is read from the log, in the ring of rank 0 and in the heartbeat file.

    `has_other_writer` becomes true if the program itself writes the heartbeat, by `toolkit.step` or `world.should_stop`.
    """

    def __init__(self, attempt: AttemptDirectory, log: Path, observe: Mapping[str, object], launcher: int = 0) -> None:
        self.has_other_writer = False
        self._attempt, self._launcher = attempt, launcher
        patterns = observe.get("step_line") or []
        assert isinstance(patterns, Sequence)
        self._patterns, self._tails = StepPatterns(patterns, self._tell), [LogTail(log)]
        self._last_rank = int(os.environ.get("TOOLKIT_WORLD_SIZE") or 1) - 1
        self._began_at = time.time()
        self._has_patterns, self._has_ring = bool(patterns), bool(observe.get("record", True))
        self._count = StepCount()
        self._step_s, self._rate = _Pace(STEP_SPAN_S), _Pace(RATE_SPAN_S)
        self._waiting: list[_Step] = []
        self._ring: Ring | None = None
        self._own_beats: list[object] = [None]  # what the heartbeat may contain if no other process writes it
        self._beat_at = -math.inf
        self._step_at: float | None = None  # when the last line was read that the heartbeat lacks
        self._seconds = math.nan
        self._lines = self._matches = 0
        self._told: set[str] = set()

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            say_beside(message)

    def read(self, *, is_over: bool = False) -> None:
        """Record the new lines, and all that waits for further lines if the rank `is_over`."""
        try:
            self._read(time.time(), is_over=is_over)
        except (OSError, ToolkitError) as error:  # a file server that does not respond
            self._tell(f"cannot record the steps of rank 0: {error}")

    def _read(self, now: float, *, is_over: bool) -> None:
        is_late = self._has_patterns and now - self._began_at > OTHER_RANK_S
        if is_late and self._last_rank and self._count.step is None and len(self._tails) == 1:
            with suppress(FileNotFoundError):
                self._tails.append(LogTail(find_log(self._attempt, self._last_rank), self._last_rank))
        lines, new = [], []
        for tail in self._tails:
            lines = tail.new(is_over=is_over)
            new = [step for line in lines if (step := self._read_line(line, now)) is not None]
            if tail.skipped and self._has_patterns:
                limit = f"{TICK_BYTES / PERIOD_S / 1e3:.0f} kB/s"
                self._tell(f"a rank prints more than {limit}: only the newest lines of each {PERIOD_S} s are read")
            if self._count.step is not None:
                self._tails = [tail]
                break
        if new:
            self._seconds, seconds = self._rate.add(now, new[-1].number), self._step_s.add(now, new[-1].number)
            for step in new:
                step.seconds = seconds
        while self._waiting and (len(self._waiting) > 1 or is_over or now - self._waiting[0].at_s >= LATE_S):
            self._record(self._waiting.pop(0))
        if lines and self._patterns.was_cut and self._count.step is not None:  # it runs, although its steps are unknown
            self._step_at = now
        if self._step_at is not None and (is_over or now - self._beat_at >= BEAT_PERIOD_S):
            self._write_beat(self._step_at)
            self._step_at, self._beat_at = None, now
        if is_over and self._has_patterns and self._lines and not self._matches:
            self._tell(f"observe.step_line matched none of the {self._lines} lines that were read")

    def _read_line(self, line: str, now: float) -> _Step | None:
        """Return the step that a line begins, if it is a new one; metrics are those of the last step."""
        report = self._patterns.read(line)
        self._lines += 1
        if report is None:
            return None
        self._matches += 1
        new = None
        if report.step is not None and self._count.is_new(report) and self._count.step is not None:
            new = _Step(self._count.step, now)
            self._waiting.append(new)
        if self._count.step is not None:  # also the bar of a validation shows that the program runs
            self._step_at = now
        if report.metrics and self._count.step is not None:
            if not self._waiting:
                self._waiting.append(_Step(self._count.step, now))
            self._waiting[-1].metrics.update(report.metrics)
        return new

    def _record(self, step: _Step) -> None:
        if self._ring is None and self._has_ring:
            self._has_ring = False
            with suppress(FileExistsError):  # the program records its own steps
                run = self._attempt.run.run_id
                self._ring = Ring.of_rank(run, self._attempt.number, 0, self._launcher, gives_way=True)
        if self._ring is None:
            return
        values = [ABSENT] * WIDTH
        if not math.isnan(step.seconds):
            values[_STEP] = step.seconds
        for name, value in step.metrics.items():
            if (column := self._ring.column(name)) is not None:
                values[column] = value
        self._ring.append(step.at_s, step.number, values)

    def _write_beat(self, at_s: float) -> None:
        current = read_json_or_none(self._attempt.heartbeat)
        if current not in self._own_beats:
            self.has_other_writer = True
            return
        beat: dict[str, object] = {"step": self._count.step, "time": utc_of(at_s), "saves": False}
        if self._count.total is not None:
            beat["total"] = self._count.total
        if not math.isnan(self._seconds):
            beat["steps_per_s"] = float(f"{1 / self._seconds:.4g}")
        self._own_beats = [current, beat]  # a write that fails by a time-out may still take effect
        try:
            write_json(self._attempt.heartbeat, beat, durable=False)
        except OSError:  # for example a full disk; the rank still runs and must not count as stalled
            with suppress(FileNotFoundError):
                os.utime(self._attempt.heartbeat)
            raise

"""Record the steps of one rank in its ring. Standard library only.

The code between two steps runs with cold processor caches, which makes it about ten times slower than in a benchmark's loop
(`benchmarks/recorder_cost.py`). So the end of a step only reads two clocks; all else happens every `PERIOD_NS`, or
at the end of a step of at least `LONG_NS`.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from resource import RUSAGE_THREAD, getrusage
from time import perf_counter_ns, thread_time_ns, time_ns
from typing import Any, Protocol

from toolkit.metrics import step_profile, windows
from toolkit.metrics.phases import PhaseSum
from toolkit.metrics.ring import ABSENT, WIDTH, Ring

__all__ = ["PhaseReader", "PhaseSampling", "Recorder"]

PERIOD_NS = 500_000_000
LONG_NS = 100_000_000
MEMORY_PERIOD_NS = 1_000_000_000
MOST_LATE = 8  # steps that wait for the phases of an earlier step before it is recorded without them
# The share of the time that phases may cost, what they cost in one step, and for each start or end of a phase in it.
PHASES_SHARE = 0.0005
SAMPLE_S, ENTRY_S = 60e-6, 6e-6
# For a script, in whose measured steps functions of torch are replaced (`benchmarks/script_waits_cost.py`).
SCRIPT_SHARE, SCRIPT_SAMPLE_S = 0.001, 600e-6

_AT = {name: column for column, name in enumerate(windows.COLUMNS)}
_STEP, _EXPOSED, _SAVE, _WORK, _WORK_CPU, _CPU_WAIT, _SWITCHES, _FAULTS, _RSS, _DEVICE, _PEAK = (
    _AT[name]
    for name in (
        windows.STEP, windows.EXPOSED, windows.SAVE, windows.WORK, windows.WORK_CPU, windows.CPU_WAIT, windows.SWITCHES,
        windows.FAULTS, windows.RSS, windows.DEVICE, windows.DEVICE_PEAK,
    )
)  # fmt: skip
_PHASES = {
    step_profile.DATA: _AT[windows.DATA],
    step_profile.FORWARD: _AT[windows.FORWARD],
    step_profile.BACKWARD: _AT[windows.BACKWARD],
    step_profile.BUBBLE: _AT[windows.BUBBLE],
    step_profile.OPTIMIZER: _AT[windows.OPTIMIZER],
}
_NO_WORK = {*step_profile.WAITS, step_profile.BUBBLE, step_profile.CHECKPOINT}
_NOTHING = [ABSENT] * WIDTH
_OWN = (_AT[windows.LOSS], _AT[windows.GRAD_NORM])  # besides the columns of names of the program

Log = Sequence[tuple[str | None, Any]]  # of the phases of a step, from `Profile.take_step`


class PhaseReader(Protocol):
    """Reads the times of the phases of a step."""

    def phases(self, log: Log) -> Mapping[str, PhaseSum] | None:
        """Return the phases of a step; None if the device has not reached its end."""
        ...


class Recorder:
    """Measures the steps of the thread that calls it. A step lasts from the end of the step before.

    `noted` has the values that the program reports of the current step, by column. `is_driven` is True if toolkit's training
    loop records the steps, so that `toolkit.step` must not. `end_reported` ends a step that the program reports.
    """

    def __init__(self, ring: Ring) -> None:
        self.is_driven = False
        self.columns = {name: column for column, name in enumerate(ring.names) if name not in windows.MEASURED}
        self.reader: PhaseReader | None = None
        self.end_reported: Callable[[int], object] = self.end
        self._ring = ring
        self.noted: dict[int, float] = {}
        self._ended: deque[tuple[int, int, int, dict[int, float], Log]] = (
            deque()
        )  # number, time, CPU time, values, phases
        self._thread: int | None = None
        self._reported: int | None = None  # the number of the last call of `step`
        self._number = self._at_ns = self._cpu_ns = 0  # of the last step that is in the ring
        self._counts = (0.0, 0.0, 0.0)
        self._write_at_ns = self._memory_at_ns = 0
        self._has_device = self._polls = False
        self._peak_before: int | None = None  # the most that torch had allocated before the first step
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._schedstat: int | None = None  # of the thread

    def column(self, name: str) -> int | None:
        """Return the column of a metric, a new one if there is none; None if all columns are in use."""
        column = self._ring.column(name)
        if column is not None:
            self.columns[name] = column
        return column

    def begin(self, number: int) -> int:
        """Start the step after step `number`, without what happened since the last step; return the time."""
        self.write()
        if self._thread != threading.get_ident():
            self._thread, self._schedstat = threading.get_ident(), _schedstat_of_thread(self._schedstat)
        if self._peak_before is None:
            cuda = _cuda()
            self._peak_before = cuda.max_memory_allocated() if cuda is not None else 0
        self._number = number
        self._at_ns, self._cpu_ns = perf_counter_ns(), thread_time_ns()
        self._count()
        return self._at_ns

    def end(self, number: int, log: Log = ()) -> int:
        """End step `number`, and start the next one; return the time in nanoseconds."""
        at_ns = perf_counter_ns()
        self._ended.append((number, at_ns, thread_time_ns(), self.noted, log))
        self.noted = {}
        # Long steps are written at once, which costs 0.1 % of them: `kill -9` loses what is not in the ring.
        if at_ns >= self._write_at_ns or at_ns - self._at_ns >= LONG_NS * len(self._ended):
            self._write_at_ns = at_ns + PERIOD_NS
            self.write()
        return at_ns

    def step(self, number: int) -> None:
        """Record the end of a step of a program whose loop is not toolkit's. The first call only starts the measurement; a repeated one does nothing.

        If a program reports only some of its steps, a record has the means of the steps since the last report.
        """
        if number == self._reported or self.is_driven:
            return
        if self._reported is None:
            self._polls = _waits_in_mpi()
            self.begin(number)
            self._write_noted()
        else:
            self.end_reported(number)
        self._reported = number

    def write(self, *, is_last: bool = False) -> None:
        """Write the finished steps to the ring, the last ones also if the device has not reached their phases."""
        if self._ended:
            self._write_ended(is_last=is_last)
        if is_last and (self._reported is not None or self.is_driven):  # else another process may record the steps
            self._write_noted()

    def _write_noted(self) -> None:
        """Write what the program has recorded of its first step, whose length is unknown, or since its last step."""
        columns = [one for one in self.noted if one >= len(windows.COLUMNS) or (one in _OWN and not self.is_driven)]
        if columns:
            values = _NOTHING.copy()
            for column in columns:
                values[column] = self.noted.pop(column)
            self._ring.append(time_ns() / 1e9, self._number, values)

    def _write_ended(self, *, is_last: bool) -> None:
        usual = self._usual_values()
        ahead_ns = time_ns() - perf_counter_ns()
        memory = self._memory() if self._ended[-1][1] >= self._memory_at_ns else {}
        # A thread that waits for a GPU or in MPI keeps the processor busy, whatever its work is.
        has_cpu = usual[_SWITCHES] != ABSENT and not self._has_device and not self._polls
        while self._ended:
            number, at_ns, cpu_ns, noted, log = self._ended[0]
            phases: Mapping[str, PhaseSum] | None = None
            if log and self.reader is not None:
                phases = self.reader.phases(log)
                if phases is None and not is_last and len(self._ended) <= MOST_LATE:
                    return
            self._ended.popleft()
            values = usual.copy()
            for column, value in (memory | noted if memory else noted).items():
                values[column] = value
            memory = {}
            scale = 1e-9 / max(1, number - self._number)
            values[_STEP] = (at_ns - self._at_ns) * scale
            if phases and self.is_driven:
                _add_phases(values, phases)
            elif _EXPOSED in noted or (phases and any(name in phases for name in step_profile.WAITS)):
                _add_work(values, phases or {}, max(1, number - self._number))
            if has_cpu and _SAVE not in noted:  # saves use the processor, too
                values[_WORK_CPU] = (cpu_ns - self._cpu_ns) * scale
            self._number, self._at_ns, self._cpu_ns = number, at_ns, cpu_ns
            self._ring.append((at_ns + ahead_ns) / 1e9, number, values)

    def _usual_values(self) -> list[float]:
        """Return what the records of all finished steps contain, unless they have values of their own."""
        values = _NOTHING.copy()
        values[_SAVE] = 0.0  # the mean of a window is that of all its steps
        if threading.get_ident() == self._thread:
            steps = len(self._ended)
            values[_SWITCHES], values[_FAULTS], waited_s = (count / steps for count in self._count())
            if self._schedstat is not None:
                values[_CPU_WAIT] = waited_s
        return values

    def _count(self) -> list[float]:
        """Return the involuntary switches, major faults and seconds of waiting for a CPU of this thread since the last call."""
        use, before = getrusage(RUSAGE_THREAD), self._counts
        waited_ns = 0 if self._schedstat is None else int(os.pread(self._schedstat, 128, 0).split()[1])
        self._counts = use.ru_nivcsw, use.ru_majflt, waited_ns / 1e9
        return [now - then for now, then in zip(self._counts, before, strict=True)]

    def _memory(self) -> dict[int, float]:
        self._memory_at_ns = self._ended[-1][1] + MEMORY_PERIOD_NS
        found = {_RSS: int(os.pread(self._statm, 128, 0).split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))}
        if (cuda := _cuda()) is not None:
            self._has_device = True
            allocated, peak = cuda.memory_allocated(), cuda.max_memory_allocated()
            # The peak of loading a model is not that of its steps. Only the program may reset the peak, which it may print.
            found[_DEVICE], found[_PEAK] = float(allocated), float(peak if peak != self._peak_before else allocated)
        return found


def _cuda() -> Any:
    """Return torch.cuda if this process uses it; it is not imported, since a program without torch must not load it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _schedstat_of_thread(known: int | None) -> int | None:
    """Open the file of the kernel's scheduler on this thread instead of a known one; None if the kernel has none."""
    if known is not None:
        os.close(known)
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _waits_in_mpi() -> bool:
    """Return whether the program of this process uses mpi4py: most MPI libraries poll while they wait."""
    mpi, main = sys.modules.get("mpi4py.MPI"), sys.modules.get("__main__")
    names = vars(main).values() if mpi is not None and main is not None else ()
    return any(value is mpi or type(value).__module__ == "mpi4py.MPI" for value in names)


def _seconds(phases: Mapping[str, PhaseSum], names: Iterable[str]) -> float:
    return sum(phases[name].own_ns for name in names if name in phases) / 1e9


def _add_phases(values: list[float], phases: Mapping[str, PhaseSum]) -> None:
    """Add the phases of a step of toolkit's loop, and its work: what is neither exposed communication, nor bubble, nor save."""
    for name, column in _PHASES.items():
        absent = ABSENT if name == step_profile.BUBBLE else 0.0  # only a pipeline has one
        values[column] = phases[name].own_ns / 1e9 if name in phases else absent
    values[_EXPOSED] = _seconds(phases, step_profile.WAITS)
    values[_WORK] = _seconds(phases, phases.keys() - _NO_WORK)


def _add_work(values: list[float], phases: Mapping[str, PhaseSum], steps: int) -> None:
    """Add the work of a step of another loop, as `_add_phases` does.

    The program has recorded its exposed communication, or `phases` has its waits during this number of steps.
    """
    step_s = values[_STEP]
    if phases:  # on a GPU, the host may be some steps ahead
        values[_EXPOSED], step_s = _seconds(phases, step_profile.WAITS) / steps, _seconds(phases, phases) / steps
    values[_WORK] = step_s - values[_EXPOSED] - max(0.0, values[_AT[windows.BUBBLE]]) - values[_SAVE]


class PhaseSampling:
    """Decides in which steps to measure phases: from `due_ns` on, and then in as many as the budget permits.

    The time between two such steps is random, since work that repeats every N steps would otherwise distort the phases.
    """

    def __init__(self, mark_s: float, *, of_script: bool = False) -> None:
        """`mark_s` is the cost of one reading of the clock."""
        self.due_ns = 0
        self._share, self._sample_s = (SCRIPT_SHARE, SCRIPT_SAMPLE_S) if of_script else (PHASES_SHARE, SAMPLE_S)
        self._entry_s = mark_s + ENTRY_S
        self._random = random.Random(0)  # not the generator of the program, which training uses

    def measured(self, entries: int, at_ns: int) -> None:
        """Choose the next step, after one with this number of starts and ends of phases that ended at `at_ns`."""
        pause_s = (self._sample_s + entries * self._entry_s) / self._share
        self.due_ns = at_ns + int(pause_s * self._random.uniform(0.5, 1.5) * 1e9)

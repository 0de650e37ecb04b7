"""Measure the time of a training step by named, nested phases. Standard library only.

    with profile.phase("forward"):
        ...

A phase costs about a microsecond while the profile is on, and one attribute lookup while it is off
(`benchmarks/phase_cost.py`). `Profile.steps` has, for each finished step, the time of every phase without its inner
phases, so that these times add up to the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["HostClock", "PhaseSum", "Profile", "sums_of"]

SETTLED_AT_ONCE = 4096  # maximum entries of a thread's log
STEP = "step"

M = TypeVar("M")


class Clock(Protocol[M]):
    """Marks moments whose times are read later, because a GPU does not know them immediately."""

    def mark(self) -> M:
        """Return a mark for this moment."""
        ...

    def nanoseconds(self, marks: Sequence[M]) -> list[int]:
        """Return the times of these marks on the scale of `time.perf_counter_ns`. May synchronize with the device."""
        ...


class HostClock:
    """The clock of the CPU; a mark is a time."""

    mark = staticmethod(time.perf_counter_ns)

    def nanoseconds(self, marks: Sequence[int]) -> list[int]:
        return list(marks)


@dataclass(frozen=True)
class Span:
    """One call of a phase. Times are on the scale of `time.perf_counter_ns`."""

    name: str
    began_ns: int
    ended_ns: int


@dataclass
class PhaseSum:
    """The sum of all calls of one phase in one thread; `own_ns` excludes inner phases."""

    calls: int = 0
    own_ns: int = 0


@dataclass(frozen=True)
class StepTimes:
    """The time of one step, and of each phase without inner phases."""

    number: int
    total_ns: int
    phases: dict[str, PhaseSum]


class Lane(Generic[M]):
    """The phases of one thread: a log of starts and ends, and sums of times. Only that thread appends to the log."""

    def __init__(self, name: str, clock: Clock[M], most_spans: int) -> None:
        self.name = name
        self.clock = clock
        self.log: list[tuple[str | None, M]] = []  # name of a phase that starts; None ends the innermost
        self.phases: dict[str, Phase[M]] = {}
        self.spans: list[Span] = []
        self.lost = 0  # number of spans dropped because of `most_spans`
        self.sums: dict[str, PhaseSum] = {}
        self._most_spans = most_spans
        self._open: list[_Open] = []
        self._settling = threading.Lock()

    def settle(self) -> None:
        """Add the log to the sums, and clear it."""
        with self._settling:
            entries = self.log[:]
            del self.log[: len(entries)]
            times = self.clock.nanoseconds([mark for _, mark in entries])
            for (name, _), at_ns in zip(entries, times, strict=True):
                if name is not None:
                    self._open.append(_Open(name, at_ns))
                elif self._open:
                    self._close(self._open.pop(), at_ns)

    def forget(self) -> None:
        """Reset the sums, the log and the open phases."""
        self.sums = {}
        self._open.clear()
        self.log.clear()

    def _close(self, phase: _Open, at_ns: int) -> None:
        taken = at_ns - phase.began_ns
        summed = self.sums.setdefault(phase.name, PhaseSum())
        summed.calls += 1
        summed.own_ns += taken - phase.inside_ns
        if self._open:
            self._open[-1].inside_ns += taken
        if len(self.spans) < self._most_spans:
            self.spans.append(Span(phase.name, phase.began_ns, at_ns))
        else:
            self.lost += 1


def sums_of(entries: Sequence[tuple[str | None, M]], clock: Clock[M]) -> dict[str, PhaseSum]:
    """Return the sums of the phases in the log of a step; the rest of the step is the phase "step".

    Return {} for the end of a log that was so long that its start was settled before.
    """
    if not entries or entries[0][0] != STEP:
        return {}
    lane = Lane("", clock, 0)
    lane.log.extend(entries)
    lane.settle()
    return lane.sums


@dataclass
class _Open:
    """A phase that has started, but has not ended in the log so far."""

    name: str
    began_ns: int
    inside_ns: int = 0


class Phase(Generic[M]):
    """The context manager of a phase in one thread. It keeps no state per use, so one instance serves all uses."""

    __slots__ = ("_append", "_lane", "_log", "_mark", "_name")

    def __init__(self, lane: Lane[M], name: str) -> None:
        self._lane, self._name = lane, name
        self._log, self._append, self._mark = lane.log, lane.log.append, lane.clock.mark

    def __enter__(self) -> None:
        self._append((self._name, self._mark()))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._append((None, self._mark()))
        if len(self._log) > SETTLED_AT_ONCE:
            self._lane.settle()


class _Nothing:
    """Replaces a phase while the profile is off."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


_NOTHING = _Nothing()


class Profile:
    """The phases of one process.

    A step consists of the phases of the training thread, which started it. Phases of other threads are recorded
    separately. A thread that Python did not start belongs to torch's backward engine. The training thread waits for it,
    so its phases count as those of the training thread.

    Args:
        clock: the clock for the training thread; other threads use the CPU clock.
        most_spans: the number of phase calls that each thread keeps for the trace; further calls only add to the sums.
    """

    def __init__(self, clock: Clock[Any] | None = None, most_spans: int = 20_000) -> None:
        self.on = False
        self.clock: Clock[Any] = clock or HostClock()
        self.most_spans = most_spans
        self.steps: list[StepTimes] = []
        self.lanes: list[Lane[Any]] = []
        self._own = threading.local()
        self._training: Lane[Any] | None = None
        self._step: int | None = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time, except that of inner phases, counts for this phase."""
        if not self.on:
            return _NOTHING
        try:
            phase: Phase[Any] = self._own.phases[name]
        except (AttributeError, KeyError):
            phase = self._new_phase(name)
        return phase

    def begin_step(self, number: int) -> None:
        """Start a step on this thread. The previous one must have ended."""
        assert self._step is None, "a step has begun and not ended"
        if self._training is None:
            self._training = self._lane_of("training", self.clock)
            self._own.phases, self._own.lane = self._training.phases, self._training
        self._training.forget()
        self._step = number
        self.on = True
        self.phase(STEP).__enter__()

    def end_step(self) -> None:
        """End the step and sum its times; phases cost nothing until the next step starts."""
        assert self._step is not None and self._training is not None, "no step has begun"
        self.phase(STEP).__exit__(None, None, None)
        self.on = False
        lane = self._training
        lane.settle()
        sums = lane.sums
        total_ns = sum(phase.own_ns for phase in sums.values())
        del sums[STEP]
        self.steps.append(StepTimes(self._step, total_ns, sums))
        self._step = None

    def take_step(self) -> list[tuple[str | None, Any]]:
        """End the step without reading its clock, and return its log for `sums_of`."""
        assert self._step is not None and self._training is not None, "no step has begun"
        self.phase(STEP).__exit__(None, None, None)
        self.on, self._step = False, None
        log = self._training.log
        entries = log[:]
        log.clear()
        return entries

    def use(self, clock: Clock[Any], most_spans: int) -> None:
        """Measure the next steps with this clock; a change drops all steps. Call it only between steps."""
        if clock is not self.clock or most_spans != self.most_spans:
            self.forget()
            self.clock, self.most_spans = clock, most_spans

    def beside(self) -> dict[str, dict[str, PhaseSum]]:
        """Return the phases of other threads, by thread and name."""
        others = [lane for lane in self.lanes if lane is not self._training]
        for lane in others:
            lane.settle()
        return {lane.name: lane.sums for lane in others}

    def forget(self) -> None:
        """Drop all steps and spans. Call it only between steps."""
        assert self._step is None, "a step has begun and not ended"
        self.steps, self.lanes, self._training, self._own = [], [], None, threading.local()

    def _new_phase(self, name: str) -> Phase[Any]:
        own = self._own
        if not hasattr(own, "lane"):
            thread = threading.current_thread()
            started_here = not isinstance(thread, threading._DummyThread)
            own.lane = self._lane_of(thread.name, HostClock()) if started_here else self._training
            own.phases = own.lane.phases
        phase: Phase[Any] = own.phases.setdefault(name, Phase(own.lane, name))
        return phase

    def _lane_of(self, name: str, clock: Clock[Any]) -> Lane[Any]:
        lane = Lane(name, clock, self.most_spans)
        self.lanes.append(lane)
        return lane

"""Measure the phases of some steps for the recorder; on a GPU by events that are read some steps later."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from time import thread_time
from typing import Any

import torch

from toolkit.metrics.phases import HostClock, PhaseSum, Profile, sums_of
from toolkit.metrics.recorder import PhaseSampling, Recorder

__all__ = ["SampledPhases"]

_MARKS = 32


class _EventClock:
    """Measures time with CUDA events, like `DeviceClock`, but never waits for the device."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def nanoseconds(self, marks: Sequence[torch.cuda.Event]) -> list[int]:
        """Return the times since the first of these events, which the device must have reached."""
        return [int(marks[0].elapsed_time(mark) * 1e6) for mark in marks]


class SampledPhases:
    """The steps of a rank whose phases are measured: as many as the budget of `PhaseSampling` permits.

    is_on: whether the current step is one of them.
    due_ns: the next one begins when a step ends after this time, on the scale of `time.perf_counter_ns`.
    """

    def __init__(self, recorder: Recorder, profile: Profile, *, on_gpu: bool, of_script: bool = False) -> None:
        self.profile = profile
        self.is_on = False
        self.due_ns = 0
        self._recorder = recorder
        self._clock: _EventClock | HostClock = _EventClock() if on_gpu else HostClock()
        self._sampling = PhaseSampling(_seconds_of_mark(self._clock), of_script=of_script)
        self._watching = ExitStack()
        recorder.reader = self

    def begin(self, number: int, *watching: AbstractContextManager[object]) -> None:
        """Measure step `number`, which starts now, within these contexts."""
        self.is_on = True
        self.profile.use(self._clock, 0)
        for context in watching:
            self._watching.enter_context(context)
        self.profile.begin_step(number)

    def end(self, number: int) -> int:
        """End step `number` in the recorder, whether it was measured or not; return the time in nanoseconds."""
        if not self.is_on:
            return self._recorder.end(number)
        self.is_on = False
        log = self.profile.take_step()
        self._watching.close()
        at_ns = self._recorder.end(number, log)
        self._sampling.measured(len(log), at_ns)
        self.due_ns = self._sampling.due_ns
        return at_ns

    def phases(self, log: Sequence[tuple[str | None, Any]]) -> Mapping[str, PhaseSum] | None:
        """Return the phases of a step; None if the GPU has not reached its end."""
        if not all(not isinstance(mark, torch.cuda.Event) or mark.query() for _, mark in reversed(log)):
            return None
        return sums_of(log, self._clock)


def _seconds_of_mark(clock: _EventClock | HostClock) -> float:
    """Return the processor time of one reading of the clock."""
    clock.mark()
    began = thread_time()
    for _ in range(_MARKS):
        clock.mark()
    return (thread_time() - began) / _MARKS

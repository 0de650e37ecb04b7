"""Phases: they add up to the step, whatever is nested in what and on which thread, and cost nothing while nobody looks."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from toolkit.metrics.phases import SETTLED_AT_ONCE, Profile


class CountedClock:
    """Every mark is one second behind the one before."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def nanoseconds(self, marks: Sequence[int]) -> list[int]:
        return [mark * 10**9 for mark in marks]


def seconds_of(profile: Profile) -> dict[str, tuple[int, float]]:
    """Calls and own seconds of the phases of the last step."""
    return {name: (phase.calls, phase.own_ns / 1e9) for name, phase in profile.steps[-1].phases.items()}


def test_a_phase_has_its_time_without_the_phases_inside_of_it() -> None:
    profile = Profile(CountedClock())
    profile.begin_step(7)  # 1
    with profile.phase("backward"):  # 2
        with profile.phase("communication"):  # 3 to 4
            pass
        with profile.phase("backward"), profile.phase("communication"):  # 5 to 8, 6 to 7: one in another of its name
            pass
    profile.end_step()  # 10
    assert seconds_of(profile) == {"communication": (2, 2.0), "backward": (2, 5.0)}
    assert (profile.steps[0].number, profile.steps[0].total_ns) == (7, 9 * 10**9)


def test_a_phase_ends_by_an_error_too() -> None:
    profile = Profile(CountedClock())
    profile.begin_step(1)
    with pytest.raises(ValueError, match="broken"), profile.phase("data"):
        raise ValueError("broken")
    with profile.phase("forward"):
        pass
    profile.end_step()
    assert seconds_of(profile) == {"data": (1, 1.0), "forward": (1, 1.0)}


def test_steps_are_apart() -> None:
    profile = Profile(CountedClock())
    for number in (1, 2):
        profile.begin_step(number)
        with profile.phase("data"):
            pass
        profile.end_step()
        assert seconds_of(profile) == {"data": (1, 1.0)}
    with profile.phase("between steps"):
        pass
    assert [step.number for step in profile.steps] == [1, 2]
    profile.forget()
    profile.begin_step(9)
    profile.end_step()
    assert len(profile.steps) == 1 and seconds_of(profile) == {}


def test_memory_is_bounded_and_sums_go_on_without_the_spans() -> None:
    profile, calls = Profile(CountedClock(), most_spans=10), 3 * SETTLED_AT_ONCE
    profile.begin_step(1)
    with profile.phase("around"):  # it is open while the log is added up
        for _ in range(calls):
            with profile.phase("small"):
                pass
            assert len(profile.lanes[0].log) <= SETTLED_AT_ONCE + 1
    profile.end_step()
    assert seconds_of(profile) == {"small": (calls, float(calls)), "around": (1, calls + 1.0)}
    (lane,) = profile.lanes
    assert (len(lane.spans), lane.lost) == (10, calls - 8)


def test_off_it_gives_one_shared_object_and_takes_no_memory() -> None:
    profile = Profile()
    assert profile.phase("data") is profile.phase("forward")

    def many() -> None:
        for _ in range(1000):
            with profile.phase("data"):
                pass

    many()
    before = sys.getallocatedblocks()
    many()
    assert sys.getallocatedblocks() - before < 10


def in_a_thread(start, work) -> None:
    done = threading.Event()

    def run() -> None:
        work()
        done.set()

    start(run)
    assert done.wait(10)


def test_another_threads_phases_are_beside_the_step() -> None:
    profile = Profile(CountedClock())

    def prefetch() -> None:
        with profile.phase("prefetch"):
            pass

    profile.begin_step(1)
    with profile.phase("data"):
        in_a_thread(lambda run: threading.Thread(target=run, name="loader").start(), prefetch)
    profile.end_step()
    assert seconds_of(profile) == {"data": (1, 1.0)}
    assert {name: list(sums) for name, sums in profile.beside().items()} == {"loader": ["prefetch"]}


def test_a_thread_that_python_did_not_start_is_the_backward_pass_of_the_training_thread() -> None:
    profile = Profile(CountedClock())

    def wait() -> None:
        with profile.phase("communication"):
            pass

    profile.begin_step(1)
    with profile.phase("backward"):
        in_a_thread(lambda run: _thread.start_new_thread(run, ()), wait)
    profile.end_step()
    assert seconds_of(profile) == {"communication": (1, 1.0), "backward": (1, 2.0)}


def test_a_clock_may_tell_the_times_late() -> None:
    """As a GPU does: marks are no numbers, and are asked for together."""
    asked: list[int] = []

    class Late(CountedClock):
        def mark(self) -> SimpleNamespace:  # type: ignore[override]
            return SimpleNamespace(at=super().mark())

        def nanoseconds(self, marks) -> list[int]:
            asked.append(len(marks))
            return [mark.at for mark in marks]

    profile = Profile(Late())
    profile.begin_step(1)
    with profile.phase("forward"):
        pass
    profile.end_step()
    assert asked == [4] and profile.steps[0].total_ns == 3

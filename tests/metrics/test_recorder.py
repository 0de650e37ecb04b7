"""The recorder: what a step contains, and in how many steps phases are measured."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from ring_rows import rows_of

from toolkit.metrics import recorder as recorder_module
from toolkit.metrics.phases import PhaseSum
from toolkit.metrics.recorder import PhaseSampling, Recorder
from toolkit.metrics.ring import Ring, RingReader
from toolkit.metrics.step_profile import CHECKPOINT, COMMUNICATION, FORWARD
from toolkit.metrics.windows import CPU_WAIT, DEVICE_PEAK, EXPOSED, FAULTS, RSS, SAVE, STEP, SWITCHES, WORK, WORK_CPU
from toolkit.metrics.windows import FORWARD as FORWARD_S


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    ring = Ring(tmp_path / "rank.ring", "run", 0, 0)
    recorder = Recorder(ring)
    recorder.begin(0)
    yield recorder
    ring.close()


def rows(recorder: Recorder) -> list[dict[str, float]]:
    recorder.write(is_last=True)
    return rows_of(RingReader(recorder._ring.path).new())


def test_a_step_has_wall_time_cpu_time_switches_faults_and_memory(recorder):
    time.sleep(0.05)
    began = time.thread_time()
    while time.thread_time() < began + 0.05:
        pass
    recorder.end(1)
    (row,) = rows(recorder)
    assert set(row) == {"ended_s", "step", STEP, WORK_CPU, CPU_WAIT, SWITCHES, FAULTS, RSS, SAVE}
    assert (row["step"], row[STEP] >= 0.1, 0.05 <= row[WORK_CPU] < row[STEP]) == (1, True, True)
    assert abs(row["ended_s"] - time.time()) < 5
    assert row[RSS] > 1e6


def test_a_step_has_the_time_that_its_thread_waited_for_a_cpu(recorder):
    cpus = os.sched_getaffinity(0)
    own = {min(cpus)}
    with subprocess.Popen(["taskset", "-c", str(min(cpus)), sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            os.sched_setaffinity(0, own)
            time.sleep(1)  # until it is busy
            recorder.begin(0)
            began = time.thread_time()
            while time.thread_time() < began + 0.2:
                pass
            recorder.end(1)
        finally:
            os.sched_setaffinity(0, cpus)
            neighbour.kill()
    (row,) = rows(recorder)
    lost_s = row[STEP] - row[WORK_CPU]
    assert row[CPU_WAIT] == pytest.approx(lost_s, rel=0.2) and lost_s > 0.1


def test_the_steps_of_a_thread_that_has_exited_are_written(tmp_path):
    ring = Ring(tmp_path / "rank.ring", "run", 0, 0)
    recorder = Recorder(ring)

    def work() -> None:
        recorder.begin(0)
        recorder._write_at_ns = 2**63  # at the end only
        recorder.end(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (row,) = rows(recorder)
    ring.close()
    assert row["step"] == 1 and WORK_CPU not in row and CPU_WAIT not in row


def test_steps_are_written_every_half_second_and_memory_is_read_once_a_second(recorder, monkeypatch):
    now_ns = recorder._at_ns
    monkeypatch.setattr(recorder_module, "perf_counter_ns", lambda: now_ns)
    reader = RingReader(recorder._ring.path)
    seen = []
    for number in range(1, 401):
        now_ns += 10_000_000
        recorder.end(number)
        seen.append(len(reader.new()))
    assert sum(seen) > 340
    assert sorted(set(seen)) == [0, 1, 50]  # the first step at once
    found = RingReader(recorder._ring.path).new()
    assert found.values(STEP) == pytest.approx([0.01] * len(found))
    assert len(found.values(RSS)) == 4


def test_the_peak_of_loading_a_model_is_not_that_of_its_steps(tmp_path, monkeypatch):
    peak = [78.0]
    cuda = SimpleNamespace(
        is_initialized=lambda: True, memory_allocated=lambda: 40.0, max_memory_allocated=lambda: peak[0]
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(recorder_module, "MEMORY_PERIOD_NS", 0)
    loaded = Recorder(Ring(tmp_path / "loaded.ring", "run", 0, 0))
    for number, peak[0] in ((0, 78.0), (1, 78.0), (2, 79.0), (3, 60.0)):  # the program resets the last one
        if number:
            loaded.end(number)
            loaded.write(is_last=True)
        else:
            loaded.begin(0)
    found = [row[DEVICE_PEAK] for row in rows_of(RingReader(loaded._ring.path).new())]
    assert found == [40.0, 79.0, 60.0]


def test_a_program_that_reports_some_steps_gets_their_mean(recorder, monkeypatch):
    now_ns = recorder._at_ns
    monkeypatch.setattr(recorder_module, "perf_counter_ns", lambda: now_ns)
    recorder.step(10)  # starts the measurement
    for number, seconds in ((20, 5), (20, 3), (5, 1)):
        now_ns += seconds * 10**9
        recorder.step(number)
    assert [(row["step"], row[STEP]) for row in rows(recorder)] == [(20, 0.5), (5, 4.0)]


def test_work_excludes_exposed_communication_and_saves(recorder, monkeypatch):
    now_ns = recorder._at_ns
    monkeypatch.setattr(recorder_module, "perf_counter_ns", lambda: now_ns)
    recorder.noted.update({recorder.columns[EXPOSED]: 2.0, recorder.columns[SAVE]: 3.0})
    now_ns += 10 * 10**9
    recorder.end(1)

    class Reader:
        def phases(self, log):
            return {FORWARD: PhaseSum(1, 10**9), COMMUNICATION: PhaseSum(3, 2 * 10**9), CHECKPOINT: PhaseSum(1, 5), "step": PhaseSum(1, 10**8)}  # fmt: skip

    recorder.is_driven, recorder.reader = True, Reader()
    recorder.end(2, [("step", 1)])
    first, second = rows(recorder)
    assert (first[WORK], WORK_CPU in first) == (5.0, False)
    assert (second[WORK], second[EXPOSED], second[FORWARD_S]) == (pytest.approx(1.1), 2.0, 1.0)


def test_the_waits_of_a_script_are_those_of_one_of_its_steps(recorder, monkeypatch):
    """The log covers two steps, as only every second one is reported; a step without a wait is not known to be all work."""
    now_ns = recorder._at_ns
    monkeypatch.setattr(recorder_module, "perf_counter_ns", lambda: now_ns)
    waits = {COMMUNICATION: PhaseSum(3, 4 * 10**9), "step": PhaseSum(1, 16 * 10**9)}
    logs = iter([waits, {"step": PhaseSum(1, 20 * 10**9)}])
    recorder.reader = SimpleNamespace(phases=lambda log: next(logs))
    for number in (2, 4):
        recorder.noted[recorder.columns[SAVE]] = 1.0
        now_ns += 20 * 10**9
        recorder.end(number, [("step", 1)])
    first, second = rows(recorder)
    assert (first[STEP], first[EXPOSED], first[WORK]) == (10.0, 2.0, 7.0)
    assert FORWARD_S not in first and EXPOSED not in second and WORK not in second


def test_a_step_whose_phases_come_late_keeps_the_order_and_a_missing_device_does_not_stop_the_ring(recorder):
    is_done = False

    class Device:
        def phases(self, log):
            return {FORWARD: PhaseSum(1, 10**9)} if is_done else None

    recorder.is_driven, recorder.reader = True, Device()
    reader = RingReader(recorder._ring.path)
    recorder.end(1, [("step", 1)])
    recorder.end(2)
    recorder.write()
    assert len(reader.new()) == 0
    is_done = True
    recorder.write()
    assert [(row["step"], FORWARD_S in row) for row in rows_of(reader.new())] == [(1, True), (2, False)]
    is_done = False
    for number in range(3, 20):
        recorder.end(number, [("step", 1)])
    recorder.write()
    assert reader.new().numbers() == list(range(3, 12))
    recorder.write(is_last=True)
    assert reader.new().numbers() == list(range(12, 20))


def test_steps_that_another_thread_ends_have_no_cpu_time(recorder):
    thread = threading.Thread(target=lambda: (recorder.end(1), recorder.write()))
    thread.start()
    thread.join()
    (row,) = rows(recorder)
    assert STEP in row and WORK_CPU not in row


@pytest.mark.parametrize(("step_s", "entries"), [(0.001, 20), (0.01, 20), (0.1, 20), (0.1, 400), (10.0, 400)])
def test_phases_are_measured_in_as_many_steps_as_the_budget_permits(step_s, entries):
    sampling = PhaseSampling(1e-6)
    at_ns = measured = 0
    for _ in range(100_000):
        at_ns += int(step_s * 1e9)
        if at_ns >= sampling.due_ns:
            measured += 1
            sampling.measured(entries, at_ns)
    cost_s = measured * (recorder_module.SAMPLE_S + entries * (1e-6 + recorder_module.ENTRY_S)) / 100_000
    assert cost_s <= 1.05 * recorder_module.PHASES_SHARE * step_s
    assert measured == 100_000 if step_s == 10.0 else measured > 150


def test_a_thread_that_waits_in_mpi_has_no_cpu_time_of_work(tmp_path):
    """MPI polls: the CPU time of a rank that waits would blame the rank that does not."""
    program = (
        "import sys, time; from pathlib import Path; from mpi4py import MPI; from toolkit.metrics.recorder import Recorder; "
        "from toolkit.metrics.ring import Ring, RingReader; from toolkit.metrics.windows import STEP, WORK_CPU; "
        "ring = Ring(Path(sys.argv[1]), 'run', 0, 0); recorder = Recorder(ring); "
        "[recorder.step(number) for number in range(3)]; recorder.write(is_last=True); "
        "new = RingReader(ring.path).new(); print(len(new.values(STEP)), len(new.values(WORK_CPU)))"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "a.ring"], capture_output=True, text=True)
    assert done.stdout == "2 0\n", done

"""Measure what the recorder of steps costs: processor time per step, on against off, and the size of its files.

    OMP_NUM_THREADS=1 python benchmarks/recorder_cost.py [--rounds 5] [--seconds 1]

A step computes for 10 or 100 ms between calls as in the training loop, with MICRO_BATCHES micro-batches. Only the calls are
timed, so that the noise of the computation does not hide them; they run with the cold caches that the computation leaves.
In each round, blocks of steps with and without the recorder alternate, and a difference compares the blocks of one round.
"warm" is the same in a loop without computation. `toolkit.step` has no phases.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import toolkit
from toolkit.metrics.collector import SLOT_S, window_of
from toolkit.metrics.phases import Profile
from toolkit.metrics.ring import WIDTH, Ring, RingReader, Steps, rings_of
from toolkit.metrics.step_profile import BACKWARD, CHECKPOINT, COMMUNICATION, DATA, FORWARD, OPTIMIZER
from toolkit.metrics.window_file import WindowFile
from toolkit.train.loop.recording import RecordedSteps
from toolkit.world.record import recorder_of_rank

MICRO_BATCHES = 2
STEPS = 100_000
Calls = Sequence[Callable[[int], None]]  # of a step; each gets its number


def loop_calls(recorded: RecordedSteps, profile: Profile) -> Calls:
    """Return the calls of a step of the training loop, between which a step computes."""

    def begin(number: int) -> None:
        recorded.begin(number)
        with profile.phase(DATA):
            pass
        with recorded.counting_bytes():
            pass
        profile.phase(FORWARD).__enter__()

    def backward(_: int) -> None:
        profile.phase(FORWARD).__exit__(None, None, None)
        profile.phase(BACKWARD).__enter__()

    def forward(_: int) -> None:
        with profile.phase(COMMUNICATION):
            pass
        profile.phase(BACKWARD).__exit__(None, None, None)
        profile.phase(FORWARD).__enter__()

    def optimizer(_: int) -> None:
        with profile.phase(COMMUNICATION):
            pass
        profile.phase(BACKWARD).__exit__(None, None, None)
        profile.phase(OPTIMIZER).__enter__()

    def end(_: int) -> None:
        profile.phase(OPTIMIZER).__exit__(None, None, None)
        recorded.logged(1024, 1.0, 1.0)
        with profile.phase(CHECKPOINT):
            pass

    return [begin, *[backward, forward] * (MICRO_BATCHES - 1), backward, optimizer, end]


def computation(seconds: float) -> Callable[[], None]:
    """Return a function that computes for this time, in more memory than the caches have."""
    matrix, vector = torch.randn(256, 256), torch.randn(2_000_000)

    def once() -> None:
        matrix @ matrix
        vector.sum()

    began = time.thread_time()
    for _ in range(50):
        once()
    times = max(1, round(seconds / ((time.thread_time() - began) / 50)))

    def compute() -> None:
        for _ in range(times):
            once()

    return compute


def seconds_per_step(calls: Calls, compute: Callable[[], None] | None, first: int, steps: int) -> float:
    """Return the processor time of the calls of a step."""
    taken_ns = 0
    for number in range(first, first + steps):
        for call in calls:
            if compute:
                compute()
            began_ns = time.thread_time_ns()
            call(number)
            taken_ns += time.thread_time_ns() - began_ns
    return taken_ns / steps / 1e9


def differences_us(on: Calls, off: Calls, compute: Callable[[], None] | None, rounds: int, steps: int) -> list[float]:
    """Return the difference per step of each round, after a round that does not count."""
    found = []
    first = 1
    for number in range(rounds + 1):
        taken = {}
        for is_on in (True, False) if number % 2 else (False, True):
            taken[is_on] = seconds_per_step(on if is_on else off, compute, first, steps)
            first += steps
        if number:
            found.append((taken[True] - taken[False]) * 1e6)
    return found


def enter_run(folder: Path) -> None:
    """Make this process rank 1 of a run in `folder`."""
    job = folder / "resolved.json"
    job.write_text(json.dumps({"observe": {"record": True}}))
    run = {"RUN_DIR": str(folder), "ATTEMPT": "0", "RANK": "1", "RESOLVED_JOB": str(job)}
    os.environ.update({f"TOOLKIT_{name}": value for name, value in run.items()})


def print_overhead(options: argparse.Namespace) -> None:
    profiles = Profile(), Profile()
    on, off = (RecordedSteps("cpu", profile, range(0), is_compiled=False) for profile in profiles)
    off._recorder = None
    recorder = recorder_of_rank()
    assert recorder is not None
    both = {
        "training loop": (loop_calls(on, profiles[0]), loop_calls(off, profiles[1])),
        "toolkit.step": ([lambda number: toolkit.step(number)], [lambda _: None]),
        "toolkit.step, 2 records": (
            [lambda number: (toolkit.record("loss", 1.0), toolkit.record("reward", 2.0), toolkit.step(number))],
            [lambda _: None],
        ),
    }
    print("us per step                    min   median      max   median, % of step")
    for step_s in (0.01, 0.1, None):
        for title, (with_it, without) in both.items():
            recorder.is_driven = title == "training loop"
            if not recorder.is_driven:
                recorder.step(0)
            compute = computation(step_s / len(with_it)) if step_s else None
            steps = max(12, round(options.seconds / step_s)) if step_s else 20_000
            found = differences_us(with_it, without, compute, options.rounds, steps)
            middle = statistics.median(found)
            share = f"{middle / step_s / 1e4:10.3f}" if step_s else ""
            length = f"{step_s * 1e3:3.0f} ms" if step_s else "  warm"
            print(f"{length} {title:24} {min(found):6.1f} {middle:8.1f} {max(found):8.1f} {share}", flush=True)


def print_collector(folder: Path) -> None:
    """Print the time to read 100 new steps of 8 ranks, and to cut the windows of 1,000 steps of 8 ranks."""
    rings = [Ring(folder / f"{rank}.ring", "cost", 0, rank) for rank in range(8)]
    readers = [RingReader(ring.path) for ring in rings]
    reads, cuts = [], []
    for _ in range(20):
        for ring in rings:
            for number in range(100):
                ring.append(1000.0 + number / 100, number, [0.01] * WIDTH)
        began = time.thread_time()
        parts = [reader.new() for reader in readers]
        reads.append((time.thread_time() - began) * 1e6)
        slots = [Steps(part.data * 10, part.names) for part in parts]
        began = time.thread_time()
        for slot in slots:
            window_of(slot, 0, "host", 0.0, SLOT_S)
        cuts.append((time.thread_time() - began) * 1e6)
    print(f"collector: 100 new steps of 8 ranks each {statistics.median(reads):.0f} us")
    print(f"collector: windows of 1,000 steps of 8 ranks, every {SLOT_S} s, {statistics.median(cuts):.0f} us")


def print_sizes(folder: Path) -> None:
    for steps_per_window in (1000, 100, 10):
        ring = Ring(folder / f"{steps_per_window}.ring", "cost", 0, 0)
        reader, file = RingReader(ring.path), WindowFile(folder / f"{steps_per_window}.bin", "host")
        for number in range(STEPS):
            ring.append(number * SLOT_S / steps_per_window, number, [0.01] * WIDTH)
            if number % steps_per_window == steps_per_window - 1:
                file.append([window_of(reader.new(), 0, "host", number // steps_per_window * SLOT_S, SLOT_S)])
        size = file.path.stat().st_size
        print(
            f"{STEPS:,} steps, one rank, {WIDTH} metrics, {steps_per_window:4} steps in 10 s: {size:,} bytes of windows"
        )
    print(f"ring of one rank: {ring.path.stat().st_size:,} bytes of shared memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds, at least 5")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a block of steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        folder = Path(name)
        enter_run(folder)
        try:
            print_overhead(options)
        finally:
            for path in rings_of(folder.name, 0):
                path.unlink()
        print_collector(folder)
        print_sizes(folder)


if __name__ == "__main__":
    main()

"""What a phase of the step profile costs: off, on, and torch.profiler.record_function beside it.

    OMP_NUM_THREADS=1 python benchmarks/phase_cost.py [--rounds 9] [--calls 20000]

Each way is called by turns, round after round, so that noise of the machine meets all of them; an empty loop's time is
taken off. `record_function` is timed in a program without a profiler, and under torch.profiler. Processor
time, so that other programs do not count. Prints one JSON object; microseconds are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from toolkit.metrics.phases import Profile


def seconds_of(make: Callable[[str], AbstractContextManager[object]], calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        with make("forward"):
            pass
    return time.process_time() - began


def seconds_of_nothing(calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        pass
    return time.process_time() - began


def one_round(calls: int) -> dict[str, float]:
    """Microseconds of a call, each way."""
    ours = Profile(most_spans=0)
    loop = seconds_of_nothing(calls)
    found = {"phase_off": seconds_of(ours.phase, calls)}
    ours.begin_step(1)
    found["phase_on"] = seconds_of(ours.phase, calls)
    ours.end_step()
    found["record_function_unprofiled"] = seconds_of(record_function, calls)
    with profile(activities=[ProfilerActivity.CPU]):
        found["record_function_profiled"] = seconds_of(record_function, calls)
    return {name: (seconds - loop) / calls * 1e6 for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="5 or more")
    parser.add_argument("--calls", type=int, default=20_000)
    options = parser.parse_args()
    one_round(1000)
    rounds = [one_round(options.calls) for _ in range(options.rounds)]
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    ratio = statistics.median(one["record_function_profiled"] / one["phase_on"] for one in rounds)
    result = {
        "rounds": options.rounds,
        "calls": options.calls,
        "torch": str(torch.__version__),
        "microseconds": {name: round(value, 3) for name, value in medians.items()},
        "record_function_profiled_by_phase_on": round(ratio, 1),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

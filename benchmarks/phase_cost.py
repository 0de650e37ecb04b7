"""Measure what a phase of the step profile costs, off and on, and torch.profiler.record_function for comparison.

    OMP_NUM_THREADS=1 python benchmarks/phase_cost.py [--rounds 9] [--calls 20000]

Each round runs all methods, so that noise affects all of them, and the time of an empty loop is subtracted.
`record_function` is timed without a profiler and under torch.profiler. Times are CPU times, which exclude other
programs. Prints one JSON object; microseconds are medians over the rounds.
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
    """Return the microseconds per call of each method."""
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
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds, at least 5")
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

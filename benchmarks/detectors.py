"""Measure how often the detectors raise false alarms, how late they find faults, and how many they miss.

    python benchmarks/detectors.py [--quick] [--ranks 2 4 8 64 1024] [--series N] [--only stragglers loss ...]

Simulates the work of each rank for 10,000 steps. A step lasts as long as its slowest rank. `quiet` work has 2 % noise.
`noisy` work has 8 % noise, a bias of 2 % per rank, hiccups in 1 of 1,000 steps, and a burst of 5 to 40 steps at 1.3 to 2
times per 20,000 steps of a rank. `ragged` work varies by 20 % each step and has the same bursts. Faults begin at step
1,000: a rank +10, +20 or +50 %, a rank 2 times slower in 20 % of its steps, a ramp to +30 % in 1,000 steps, a node
+10 %. The detectors read windows of 50 steps, as in a job. Alarms are changes to "raised", counted per job.

Prints one line per cell and a JSON object at the end. `most` is the upper end of a 95 % interval (Poisson, one-sided)
of the false alarms per 10,000 steps. Delays are in steps (stragglers, losses, throughput) or minutes (leaks).
`--quick` runs 1 series per cell of 2 and 8 ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from toolkit.metrics.blocks import StepBlock
from toolkit.metrics.detectors.imbalance import ImbalanceDetector
from toolkit.metrics.detectors.loss import LossDetector
from toolkit.metrics.detectors.memory_leak import MemoryLeakDetector
from toolkit.metrics.detectors.straggler import StragglerDetector
from toolkit.metrics.detectors.throughput import ThroughputDetector
from toolkit.metrics.judge import OpenVerdicts
from toolkit.metrics.samples import LossSample, MemorySample
from toolkit.metrics.verdicts import Verdict
from toolkit.metrics.windows import EXPOSED, STEP, WORK, Statistics, Window

STEPS, BLOCK, BASE_S, FAULT = 10_000, 50, 0.25, 1_000
COMMUNICATION_S = 0.02 * BASE_S
SERIES = {2: 200, 3: 100, 4: 200, 8: 100, 64: 120, 1024: 30}
NOISES = ("quiet", "noisy", "ragged")
FAULTS = ("+10 %", "+20 %", "+50 %", "intermittent", "ramp", "node +10 %")
ORDER = [0, BLOCK - 1, (BLOCK - 1) // 2, round(0.95 * (BLOCK - 1))]  # minimum, maximum, median, 95th percentile
GIB = 2**30


@dataclass(frozen=True)
class Cell:
    """The result of one table cell. Delays are of the found faults."""

    table: str
    ranks: int
    noise: str
    fault: str
    series: int
    steps: int
    false_alarms: int
    rate: float  # false alarms per 10,000 steps
    most: float  # upper end of its 95 % interval
    missed: int
    delay: float
    worst: float


def highest_rate(events: int, exposure: float) -> float:
    """Return the one-sided 95 % upper bound of a Poisson rate: the mean that gives so few events in 5 % of cases."""
    low, high = 0.0, events + 10 * math.sqrt(events + 1) + 10
    for _ in range(60):
        mean = (low + high) / 2
        term, total = math.exp(-mean), 0.0
        for number in range(events + 1):
            total += term
            term *= mean / (number + 1)
        low, high = (mean, high) if total > 0.05 else (low, mean)
    return high / exposure


def work_of(noise: str, ranks: int, steps: int, random: np.random.Generator) -> np.ndarray:
    """Return the work of each step and rank in seconds."""
    spread = {"quiet": 0.02, "noisy": 0.08, "ragged": 0.20}[noise]
    work = 1 + spread * random.standard_normal((steps, ranks), dtype=np.float32)
    np.maximum(work, 0.2, out=work)
    if noise == "noisy":
        work *= 1 + 0.02 * random.standard_normal(ranks, dtype=np.float32)
        hiccups = random.poisson(steps * ranks / 1000)
        work[random.integers(0, steps, hiccups), random.integers(0, ranks, hiccups)] *= random.uniform(2, 5, hiccups)
    if noise != "quiet":
        for _ in range(random.poisson(steps * ranks / 20_000)):
            begin, rank = random.integers(0, steps), random.integers(0, ranks)
            work[begin : begin + random.integers(5, 41), rank] *= random.uniform(1.3, 2)
    return BASE_S * work


def add_fault(work: np.ndarray, fault: str, first: int, random: np.random.Generator) -> list[int]:
    """Slow a rank or the node of ranks 0 to 7 from step `first` on, and return the slow ranks."""
    steps, ranks = work.shape
    if fault.startswith("node"):
        work[first:, :8] *= 1.1
        return list(range(8))
    rank = int(random.integers(0, ranks))
    factor: object = {"+10 %": 1.1, "+20 %": 1.2, "+50 %": 1.5}.get(fault)
    if fault == "intermittent":
        factor = np.where(random.random(steps - first) < 0.2, 2.0, 1.0)
    elif fault == "ramp":
        factor = 1 + 0.3 * np.minimum(1, np.arange(steps - first) / 1000)
    work[first:, rank] *= factor
    return [rank]


def blocks_of(work: np.ndarray) -> Iterator[StepBlock]:
    """Yield blocks of 50 steps; eight ranks share a node."""
    for number in range(work.shape[0] // BLOCK):
        own = work[number * BLOCK : (number + 1) * BLOCK]
        step = own.max(axis=1) + COMMUNICATION_S
        exposed = step[:, None] - own
        of_work = np.stack([own.mean(axis=0), *np.sort(own, axis=0)[ORDER]], axis=1).tolist()
        of_exposed = np.stack([exposed.mean(axis=0), exposed.min(axis=0)], axis=1).tolist()
        of_step = Statistics(*np.concatenate([[step.mean()], np.sort(step)[ORDER]]).tolist())
        windows = []
        for rank, (row, (mean, least)) in enumerate(zip(of_work, of_exposed, strict=True)):
            metrics = {STEP: of_step, WORK: Statistics(*row), EXPOSED: Statistics(mean, least, mean, mean, mean)}
            began_s = number * BLOCK * BASE_S
            windows.append(
                Window(
                    rank,
                    f"n{rank // 8}",
                    began_s,
                    BLOCK * BASE_S,
                    number * BLOCK,
                    (number + 1) * BLOCK - 1,
                    BLOCK,
                    metrics,
                )
            )
        yield StepBlock(tuple(windows))


def alarms_of(detector: object, blocks: Iterator[StepBlock]) -> Iterator[tuple[StepBlock, Verdict]]:
    opened = OpenVerdicts(detector.clear_after)  # type: ignore[attr-defined]
    for block in blocks:
        for verdict in opened.update(detector.observe(block), block.end_s):  # type: ignore[attr-defined]
            if verdict.state == "raised":
                yield block, verdict


def cell(
    table: str, ranks: int, noise: str, fault: str, series: int, steps: int, false: int, delays: list[float]
) -> Cell:
    """Combine the series of a cell; without a fault, `delays` is empty and nothing is missed."""
    missed = series - len(delays) if fault != "none" else 0
    exposure = steps / STEPS
    result = Cell(
        table, ranks, noise, fault, series, steps, false, round(false / exposure, 4),
        round(highest_rate(false, exposure), 4), missed, float(np.median(delays)) if delays else 0.0,
        max(delays, default=0.0),
    )  # fmt: skip
    print(
        f"{table:<11} {ranks:>5} {noise:<7} {fault:<12} series {series:>4}  false {false:>3}, {result.rate:.3f} (most "
        f"{result.most:.3f}) per 10k  delay {result.delay:g} (worst {result.worst:g})  missed {missed}",
        flush=True,
    )
    return result


def stragglers(ranks: int, noise: str, series: int, faults: int) -> Iterator[Cell]:
    """Yield the cells of one number of ranks: without a fault, then with each fault."""
    random = np.random.default_rng([ranks, NOISES.index(noise)])
    alarms = {"straggler": 0, "throughput": 0, "imbalance": 0}
    found_imbalance = 0
    for _ in range(series):
        blocks = list(blocks_of(work_of(noise, ranks, STEPS, random)))
        alarms["straggler"] += sum(1 for _ in alarms_of(StragglerDetector(), iter(blocks)))
        alarms["throughput"] += sum(1 for _ in alarms_of(ThroughputDetector(), iter(blocks)))
        imbalances = sum(1 for _ in alarms_of(ImbalanceDetector(), iter(blocks)))
        alarms["imbalance"] += imbalances if noise == "quiet" else 0  # the other work is imbalanced
        found_imbalance += imbalances > 0
    for table, count in alarms.items():
        if table != "imbalance" or noise == "quiet":
            yield cell(table, ranks, noise, "none", series, series * STEPS, count, [])
        elif noise == "ragged":
            yield cell(table, ranks, noise, "uneven work", series, series * STEPS, 0, [0.0] * found_imbalance)
    for fault in FAULTS:
        if not fault.startswith("node") or ranks >= 64:
            yield _fault_cell(ranks, noise, fault, faults, random)


def _fault_cell(ranks: int, noise: str, fault: str, series: int, random: np.random.Generator) -> Cell:
    delays, false, steps = [], 0, 0
    for _ in range(series):
        work = work_of(noise, ranks, FAULT + STEPS // 2, random)
        slow = add_fault(work, fault, FAULT, random)
        last = work.shape[0]
        for block, verdict in alarms_of(StragglerDetector(), blocks_of(work)):
            if set(verdict.ranks) <= set(slow) and block.steps[0] >= FAULT:
                last = block.steps[1] + 1
                delays.append(last - FAULT)
                break
            false += 1
        steps += last
    return cell("straggler", ranks, noise, fault, series, steps, false, delays)


def throughputs(series: int) -> Iterator[Cell]:
    """Yield the delays of the throughput detector: all ranks of a job of 8 become slower."""
    random = np.random.default_rng(7)
    for noise in NOISES:
        for fault, factor in (("+10 %", 1.1), ("+20 %", 1.2), ("+50 %", 1.5)):
            delays, false = [], 0
            for _ in range(series):
                work = work_of(noise, 8, STEPS, random)
                work[STEPS // 2 :] *= factor
                for block, _ in alarms_of(ThroughputDetector(), blocks_of(work)):
                    if block.steps[0] >= STEPS // 2:
                        delays.append(float(block.steps[1] + 1 - STEPS // 2))
                        break
                    false += 1
            yield cell("throughput", 8, noise, fault, series, series * STEPS // 2, false, delays)


def losses(series: int) -> Iterator[Cell]:
    """Yield false alarms and delays of losses that fall from 10 to 2; noise in percent."""
    random = np.random.default_rng(11)
    for noise in (1, 3, 8):
        for fault in ("none", "spike +50 %", "divergence"):
            delays, false = [], 0
            for _ in range(series):
                loss = 2 + 8 * np.exp(-np.arange(STEPS) / 1500)
                loss *= 1 + noise / 100 * random.standard_normal(STEPS)
                if fault == "spike +50 %":
                    loss[STEPS // 2] *= 1.5
                elif fault == "divergence":
                    loss[STEPS // 2 :] *= 3
                first = _first_alarm(loss, fault)
                false += first.false
                delays += [] if first.delay is None else [first.delay]
            yield cell("loss", 1, f"{noise} %", fault, series, series * STEPS, false, delays)


@dataclass(frozen=True)
class FirstAlarm:
    false: int
    delay: float | None


def _first_alarm(loss: np.ndarray, fault: str) -> FirstAlarm:
    detector, opened, false = LossDetector(), OpenVerdicts(128), 0
    wanted = {"none": "", "spike +50 %": "loss_spike", "divergence": "divergence"}[fault]
    for step, value in enumerate(loss.tolist()):
        for verdict in opened.update(detector.observe(LossSample(float(step), step, value)), float(step)):
            if verdict.state == "raised" and step >= STEPS // 2 and wanted:
                if verdict.kind == wanted:
                    return FirstAlarm(false, float(step - STEPS // 2))
            elif verdict.state == "raised":
                false += 1
    return FirstAlarm(false, None)


MIB = 2**20
USES: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "flat": lambda t, r: 4 * GIB + 4 * MIB * r.standard_normal(len(t)),
    "sawtooth": lambda t, r: 4 * GIB + 1 * GIB * ((t / 600 + r.random()) % 1) + 4 * MIB * r.standard_normal(len(t)),
    "plateaus": lambda t, r: 4 * GIB + 256 * MIB * np.cumsum(r.random(len(t)) < 1 / 180) + MIB * r.standard_normal(len(t)),
    "random walk": lambda t, r: 4 * GIB + np.cumsum(2 * MIB * r.standard_normal(len(t))),
}  # fmt: skip


def leaks(series: int) -> Iterator[Cell]:
    """Yield false alarms in 4 h, and the delay in minutes of leaks of 1 and 5 MB/s; 64 GiB are free at the start."""
    random = np.random.default_rng(13)
    times = np.arange(0, 4 * 3600, 10.0)
    for name, use in USES.items():
        for fault, rate in (("none", 0.0), ("1 MB/s", 1e6), ("5 MB/s", 5e6)):
            delays, false, errors = [], 0, []
            for _ in range(series):
                used = use(times, random) + rate * times
                detector, opened = MemoryLeakDetector(), OpenVerdicts(MemoryLeakDetector.clear_after)
                for time_s, value in zip(times.tolist(), used.tolist(), strict=True):
                    free = 64 * GIB + float(used[0]) - value
                    found = detector.observe([MemorySample(time_s, "n0", 0, "host", value, free)])
                    raised = (
                        [] if found is None else [one for one in opened.update(found, time_s) if one.state == "raised"]
                    )
                    if raised and rate:
                        delays.append(time_s / 60)
                        errors.append(abs(raised[0].evidence["seconds_to_limit"] / (64 * GIB / rate - time_s) - 1))
                        break
                    false += len(raised)
            result = cell("leak", 1, name, fault, series, series * STEPS, false, delays)
            if errors:
                print(
                    f"            error of the time to the limit: median {np.median(errors):.0%}, worst {max(errors):.0%}"
                )
            yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8, 64, 1024])
    parser.add_argument(
        "--series", type=int, default=0, help="series per cell without a fault; 0 is a number per ranks"
    )
    parser.add_argument("--faults", type=int, default=30, help="series per cell with a fault")
    parser.add_argument("--only", nargs="+", default=["stragglers", "throughput", "loss", "leak"])
    parser.add_argument("--quick", action="store_true", help="1 series per cell, 2 and 8 ranks")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.series, options.faults = [2, 8], 1, 1
    began, cells = time.monotonic(), []
    if "stragglers" in options.only:
        for ranks in options.ranks:
            for noise in NOISES:
                cells += stragglers(ranks, noise, options.series or SERIES.get(ranks, 30), options.faults)
    for name, table in (("throughput", throughputs), ("loss", losses), ("leak", leaks)):
        if name in options.only:
            cells += table(options.faults)
    minutes = (time.monotonic() - began) / 60
    print(json.dumps({"minutes": round(minutes, 1), "cells": [asdict(one) for one in cells]}))


if __name__ == "__main__":
    main()

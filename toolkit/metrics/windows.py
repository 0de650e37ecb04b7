"""Windows: statistics of the steps of one rank over an interval of time. Standard library only."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BACKWARD", "BUBBLE", "BYTES", "COLUMNS", "CPU_WAIT", "DATA", "DEVICE", "DEVICE_PEAK", "EXPOSED", "FAULTS", "FORWARD", "GRAD_NORM",
    "LOSS", "MEASURED", "METRIC_NAME", "MOST_USER_METRICS", "NOT_FINITE_AFTER", "NOT_MEASURED", "ONE_RANK_READ", "OPTIMIZER", "RSS", "SAVE", "STEP",
    "SWITCHES", "TOKENS", "WORK", "WORK_CPU", "Statistics", "Window", "declared_metrics", "merge", "printed_metrics",
    "statistics_of",
]  # fmt: skip

# Metrics of a step. Times are in seconds; a metric that a program does not report is absent from its windows.
STEP = "step_s"
DATA = "data_s"
FORWARD = "forward_s"
BACKWARD = "backward_s"
EXPOSED = "exposed_s"  # exposed communication: the rank waits for others
BUBBLE = "bubble_s"  # a stage of a pipeline waits for its neighbors, which no faster network avoids
OPTIMIZER = "optimizer_s"
SAVE = "save_s"
WORK = "work_s"  # the step without exposed communication, bubble and saves
WORK_CPU = "work_cpu_s"  # CPU time of the step's thread during work
CPU_WAIT = "cpu_wait_s"  # the step's thread was ready to run, and its CPUs ran other threads
SWITCHES = "switches"  # involuntary context switches
FAULTS = "major_faults"
BYTES = "bytes"  # bytes that the rank sent
TOKENS = "tokens"
LOSS = "loss"
GRAD_NORM = "grad_norm"
RSS = "rss_bytes"  # resident memory of the rank, in one step per second
DEVICE = "device_bytes"  # memory that the rank allocated on its GPU, in one step per second
DEVICE_PEAK = "device_peak_bytes"  # the most that steps have allocated there by torch, without what it caches
# Of a program that reports its steps only; CPU time is still compared.
NOT_MEASURED = (
    "work of ranks is not measured: record exposed_s, the seconds that a rank waits for others (docs/python.md)"
)
ONE_RANK_READ = "steps are read from the output of one rank, so it is unknown which rank is slow"
# Only in windows: steps from the first one of the window to the first one whose loss is not finite.
NOT_FINITE_AFTER = "loss_not_finite_after"
# All metrics of a step, in the order of their values in a record; a program may record others.
COLUMNS = (
    STEP, DATA, FORWARD, BACKWARD, EXPOSED, BUBBLE, OPTIMIZER, SAVE, WORK, WORK_CPU, CPU_WAIT, SWITCHES, FAULTS, BYTES,
    TOKENS, LOSS, GRAD_NORM, RSS, DEVICE, DEVICE_PEAK,
)  # fmt: skip
# What toolkit measures itself; a program may record every other metric.
MEASURED = frozenset((STEP, WORK, WORK_CPU, CPU_WAIT, SWITCHES, FAULTS, RSS, DEVICE, DEVICE_PEAK))
METRIC_NAME = r"[A-Za-z_][A-Za-z0-9_./-]{0,62}"
MOST_USER_METRICS = 16  # names besides COLUMNS


def declared_metrics(job: Mapping[str, Any]) -> dict[str, bool]:
    """Return the metrics that a resolved job declares, each with whether rules compare the mean over ranks."""
    observe = job.get("observe") or {}
    declared = observe.get("metrics") or ()  # jobs of older versions have no such key
    printed = dict.fromkeys(printed_metrics(observe.get("step_line") or ()), False)
    return printed | {name.removesuffix(":mean"): name.endswith(":mean") for name in declared}


def printed_metrics(patterns: Sequence[str]) -> list[str]:
    """Return the metrics that the patterns in `observe.step_line` read from the output of rank 0."""
    groups = dict.fromkeys(name for pattern in patterns for name in re.compile(pattern).groupindex)
    return [name for name in groups if name not in ("step", "total")]


@dataclass(frozen=True)
class Statistics:
    """The values of one metric in a window."""

    mean: float
    minimum: float
    maximum: float
    median: float
    p95: float


@dataclass(frozen=True)
class Window:
    """The steps that one rank finished in an interval.

    `began_s` is in seconds since the epoch, `seconds` the length of the interval. `first_step` and `last_step` are the
    numbers of the first and last of `steps` records; a program that reports only some of its steps has gaps between them.
    """

    rank: int
    host: str
    began_s: float
    seconds: float
    first_step: int
    last_step: int
    steps: int
    metrics: Mapping[str, Statistics]

    def mean(self, name: str) -> float:
        """Return the mean of a metric; 0 if the window does not have it."""
        return self.metrics[name].mean if name in self.metrics else 0.0


def statistics_of(values: Sequence[float]) -> Statistics:
    """Return the statistics of at least one value; percentiles are the nearest ranks."""
    ordered = sorted(values)
    count = len(ordered)
    return Statistics(
        mean=sum(ordered) / count, minimum=ordered[0], maximum=ordered[-1], median=ordered[(count - 1) // 2],
        p95=ordered[min(count - 1, round(0.95 * (count - 1)))],
    )  # fmt: skip


def merge(windows: Sequence[Window]) -> Window:
    """Return consecutive windows of one rank as one.

    Count, mean, minimum and maximum are exact. Median and 95th percentile are means of those of the windows, weighted by
    steps.
    """
    first, last = windows[0], windows[-1]
    names = {name: None for window in windows for name in window.metrics}
    metrics = {name: _merged(name, windows) for name in names}
    if bad := next((window for window in windows if NOT_FINITE_AFTER in window.metrics), None):
        after = bad.first_step - first.first_step + bad.mean(NOT_FINITE_AFTER)
        metrics[NOT_FINITE_AFTER] = statistics_of([after])
    return Window(
        first.rank, first.host, first.began_s, last.began_s + last.seconds - first.began_s, first.first_step, last.last_step,
        sum(window.steps for window in windows), metrics,
    )  # fmt: skip


def _merged(name: str, windows: Sequence[Window]) -> Statistics:
    parts = [(window.metrics[name], window.steps) for window in windows if name in window.metrics]
    steps = sum(count for _, count in parts)

    def weighted(field: str) -> float:
        return sum(getattr(part, field) * count for part, count in parts) / steps if steps else 0.0

    return Statistics(
        mean=weighted("mean"), minimum=min(part.minimum for part, _ in parts), maximum=max(part.maximum for part, _ in parts),
        median=weighted("median"), p95=weighted("p95"),
    )  # fmt: skip

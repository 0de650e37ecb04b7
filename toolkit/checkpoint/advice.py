"""Recommends a checkpoint interval from the measured cost of saves and the failures of a run. Does not import torch.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974, pp. 530-531:
the interval is sqrt(2 C M) for saves of C seconds and a mean time M between failures. Valid if C is far below M.

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22 (2006), pp. 303-312: equation 37 is the interval, equation 20 the resulting run time. Both assume random
failures at a constant rate, also during saves and restarts. If C is 2 M or more, no interval works well.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from toolkit.errors import ToolkitError
from toolkit.metrics.checkpoints import CENTURY_S, SaveRecord, read_save_log, seconds_since_epoch
from toolkit.metrics.step_advice import Advice
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.states import Cause
from toolkit.units import shorten_duration

__all__ = ["advice_lines", "interval_advice", "warning_line"]

# Random failures, which lose the steps since the last save. A preemption counts only if its ranks could not save.
_FAILURES = {
    Cause.CRASHED: "crashed", Cause.STALLED: "stalled", Cause.NODE_LOST: "lost a node",
    Cause.SUPERVISOR_LOST: "lost the supervisor", Cause.SUPERVISOR_FAILED: "the supervisor failed",
    Cause.PREEMPTED: "preempted without a save",
}  # fmt: skip
_CONFIDENCE = 0.95
# An interval is bad if the fraction of time that it loses exceeds the optimum by both this factor and this difference.
_TIMES_WORSE, _SHARE_WORSE = 2.0, 0.01


def young_interval(cost_s: float, mtbf_s: float) -> float:
    """Return Young's first-order optimum: the seconds of work between two saves that take `cost_s` each."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order optimum: the seconds of work between two saves that take `cost_s` each."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young_interval(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def lost_share(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the fraction of time, in [0, 1], that saves and repeated work take, excluding the restarts themselves."""
    exponent = (interval_s + cost_s) / mtbf_s
    return 1 - interval_s / (mtbf_s * math.expm1(exponent)) if exponent < 700 else 1.0


def failure_bounds(failures: int, seconds: float) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean time between failures in seconds (Garwood, Biometrika 28, 1936).

    Exact for a constant failure rate. Without failures, the lower bound is a third of `seconds` (the rule of three,
    one-sided), and the upper bound is infinite.
    """
    if failures == 0:
        return seconds / -math.log(1 - _CONFIDENCE), math.inf
    tail = (1 - _CONFIDENCE) / 2
    most = _expected_where(lambda expected: _poisson_at_most(failures, expected) > tail, failures)
    least = _expected_where(lambda expected: 1 - _poisson_at_most(failures - 1, expected) < tail, failures)
    return seconds / most, seconds / least


def _expected_where(is_possible: Callable[[float], bool], failures: int) -> float:
    """Find the largest expected number of failures for which `is_possible` is true, by bisection."""
    low, high = 0.0, 10.0 * failures + 10
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if is_possible(middle) else (low, middle)
    return high


def _poisson_at_most(count: int, expected: float) -> float:
    logs = (number * math.log(expected) - expected - math.lgamma(number + 1) for number in range(count + 1))
    return min(1.0, math.fsum(map(math.exp, logs)))


@dataclass(frozen=True)
class Costs:
    """The measured saves and failures of a run.

    `cost_s` is the median time that training waits for a save, excluding writes in the background. `interval_s` is the
    median time of work between two saves, None if no attempt saved twice. `seconds` is the running time of the ranks.
    `failures` counts random failures of attempts that completed a step, by kind. `foreseen` counts exits at the
    walltime limit, and preemptions after a save.
    """

    saves: int
    cost_s: float
    interval_s: float | None
    seconds: float
    failures: Mapping[str, int]
    foreseen: int

    @property
    def bounds(self) -> tuple[float, float]:
        return failure_bounds(sum(self.failures.values()), self.seconds)

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures in seconds; its lower bound if there were no failures."""
        count = sum(self.failures.values())
        return self.seconds / count if count else self.bounds[0]

    @property
    def best_s(self) -> float:
        """The interval in seconds that loses the least time; its lower bound if there were no failures."""
        return daly_interval(self.cost_s, self.mtbf_s)

    def is_bad(self) -> bool:
        """Return whether the interval is bad at both bounds of the mean time between failures."""
        if self.interval_s is None:
            return False
        least, most = self.bounds
        if math.isinf(most):  # without failures, only saves cost time: the interval cannot be too long
            share = self.cost_s / (self.cost_s + self.interval_s)
            return self.interval_s < self.best_s and share > _SHARE_WORSE and self._is_bad_for(least)
        return self._is_bad_for(least) and self._is_bad_for(most)

    def _is_bad_for(self, mtbf_s: float) -> bool:
        assert self.interval_s is not None
        now = lost_share(self.interval_s, self.cost_s, mtbf_s)
        best = lost_share(daly_interval(self.cost_s, mtbf_s), self.cost_s, mtbf_s)
        return now > _TIMES_WORSE * best and now - best > _SHARE_WORSE


def measured(run_directory: Path) -> Costs | None:
    """Return the costs of a run or task, or None before its first save. Raises ToolkitError if a file is damaged."""
    run = RunDirectory(run_directory)
    records = read_save_log(run.metrics / "checkpoints.jsonl")
    good = [record for record in records if record.error is None]
    if not good:
        return None
    gaps = [
        after.began_at - before.went_on_at
        for before, after in pairwise(records)
        if before.attempt == after.attempt and after.why not in ("stop", "end")
    ]
    seconds, failures, foreseen = _running_times(run, records)
    return Costs(
        saves=len(good),
        cost_s=median(record.waited_s for record in good),
        interval_s=max(0.0, median(gaps)) if gaps else None,
        seconds=seconds,
        failures=failures,
        foreseen=foreseen,
    )


def _running_times(run: RunDirectory, records: list[SaveRecord]) -> tuple[float, dict[str, int], int]:
    """Return the running time of all attempts in seconds, the random failures by kind, and the foreseen exits."""
    saved_at_stop = {record.attempt for record in records if record.why == "stop" and record.error is None}
    seconds, failures, foreseen = 0.0, Counter[str](), 0
    for number in run.attempt_numbers():
        end = AttemptRecord.read(run.attempt(number))
        if end is None:
            seconds += _seconds_so_far(run.attempt(number), records)
            continue
        seconds += _seconds_in(end, run.attempt(number).exit_file)
        cause = end.cause
        if cause == Cause.WALLTIME or (cause == Cause.PREEMPTED and number in saved_at_stop):
            foreseen += 1
        elif cause in _FAILURES and end.step is not None:
            failures[_FAILURES[cause]] += 1
    return seconds, dict(failures), foreseen


def _seconds_so_far(attempt: AttemptDirectory, records: list[SaveRecord]) -> float:
    """Return the running time of an attempt without an exit record, until its last save."""
    start = StartRecord.read(attempt)
    ended_at = [record.ended_at for record in records if record.attempt == attempt.number]
    if start is None or not ended_at:
        return 0.0
    try:
        return max(0.0, max(ended_at) - seconds_since_epoch(start.time))
    except ValueError as error:
        raise ToolkitError(
            f"'time' is not a valid timestamp: {error}", where=str(attempt.start_file), fix="restore the file"
        ) from None


def _seconds_in(end: AttemptRecord, path: Path) -> float:
    seconds = end.seconds
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < CENTURY_S:
        raise ToolkitError(
            f"'seconds' is not a valid duration: {seconds!r:.40}", where=str(path), fix="restore the file"
        )
    return float(seconds)


def advice_lines(run_directory: Path) -> list[str]:
    """Return lines that report the cost of saves, the failures and the best interval, or why these are unknown."""
    costs, unknown = _measured_or_why_not(run_directory)
    if costs is None:
        return [unknown] if unknown else []
    every = "" if costs.interval_s is None else f", one per {shorten_duration(costs.interval_s)} of work"
    lines = [
        f"saves: {costs.saves} at {shorten_duration(costs.cost_s)} each{every} (medians)",
        f"failures: {_format_failures(costs)}",
        _format_optimum(costs),
    ]
    return [*lines, _recommendation(costs).line] if costs.is_bad() else lines


def _format_optimum(costs: Costs) -> str:
    best_s, interval_s = costs.best_s, costs.interval_s
    sources = f"(Daly 2006; Young 1974: {shorten_duration(young_interval(costs.cost_s, costs.mtbf_s))})"
    if not costs.failures:
        now = "" if interval_s is None else f"; saves now take {_percent(costs.cost_s / (costs.cost_s + interval_s))}"
        return f"no need to save more often than every {shorten_duration(best_s)} of work {sources}{now}"
    now = "" if interval_s is None else f" (now {_percent(lost_share(interval_s, costs.cost_s, costs.mtbf_s))})"
    best = _percent(lost_share(best_s, costs.cost_s, costs.mtbf_s))
    return f"the best interval is {shorten_duration(best_s)} of work {sources}, which loses {best} of the time{now}"


def warning_line(run_directory: Path) -> str:
    """Return the line that recommends a change, or reports that the costs are unknown; "" if neither applies."""
    costs, unknown = _measured_or_why_not(run_directory)
    return _recommendation(costs).line if costs is not None and costs.is_bad() else unknown


def interval_advice(run_directory: Path) -> list[Advice]:
    """Return the advice on the save interval, [] if it is good enough or its costs are unknown."""
    costs, _ = _measured_or_why_not(run_directory)
    return [_recommendation(costs)] if costs is not None and costs.is_bad() else []


def _measured_or_why_not(run_directory: Path) -> tuple[Costs | None, str]:
    try:
        costs = measured(run_directory)
    except (OSError, ToolkitError) as error:
        return None, f"the cost of saves is unknown: {error}"
    return (costs if costs is not None and costs.seconds > 0 and costs.cost_s > 0 else None), ""


def _format_failures(costs: Costs) -> str:
    least, most = costs.bounds
    besides = f"; exits at walltime or by preemption: {costs.foreseen}" if costs.foreseen else ""
    count = sum(costs.failures.values())
    if not count:
        return f"none in {shorten_duration(costs.seconds)}, so at most one per {shorten_duration(least)} (95 %, rule of three){besides}"
    kinds = ", ".join(f"{name}: {number}" for name, number in costs.failures.items())
    return (
        f"{count} in {shorten_duration(costs.seconds)} ({kinds}): one per {shorten_duration(costs.mtbf_s)} "
        f"(95 % interval: {shorten_duration(least)} to {shorten_duration(most)}){besides}"
    )


def _recommendation(costs: Costs) -> Advice:
    assert costs.interval_s is not None
    now = lost_share(costs.interval_s, costs.cost_s, costs.mtbf_s)
    best = lost_share(costs.best_s, costs.cost_s, costs.mtbf_s)
    every_s, often = max(1, round(costs.best_s)), "less" if costs.interval_s < costs.best_s else "more"
    return Advice(
        "save interval", f"save {often} often",
        f"about {_percent(now)} of the time is lost to saves and repeated steps, but only {_percent(best)} "
        f"with checkpoint.every_s = {every_s} and every_steps = 0", now, source="checkpoints.jsonl", gain=now - best,
        evidence={"save_s": costs.cost_s, "interval_s": costs.interval_s, "mtbf_s": costs.mtbf_s}, effort="low",
        formula="lost share now - at the best interval (Daly 2006)", is_neutral=True,
        settings=(f"checkpoint.every_s={every_s}", "checkpoint.every_steps=0"),
    )  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"

"""What the page, the report and the terminal show of a run, computed from its readings. Every part has a bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from toolkit.metrics import windows
from toolkit.metrics.checkpoints import seconds_since_epoch
from toolkit.metrics.verdicts import line_of_verdict
from toolkit.observe.readings import RunReadings
from toolkit.observe.window_grid import AT, COLUMNS, PACE, Array, WindowGrid

__all__ = ["HEAT", "SCALE", "view_of"]

# The metrics of the heat map. The first known one is the default: if a program reports only its steps, CPU time differs.
HEAT = {
    "work": windows.WORK, "CPU time of work": windows.WORK_CPU, "step": windows.STEP, "data": windows.DATA,
    "exposed": windows.EXPOSED, "memory": windows.RSS, "GPU memory": windows.DEVICE,
}  # fmt: skip
PARTS = (windows.DATA, windows.FORWARD, windows.BACKWARD, windows.EXPOSED, windows.BUBBLE, windows.OPTIMIZER)
MOST_ROWS, MOST_EVENTS, MOST_NODES = 1024, 200, 8  # in a larger run, a row of the heat map is the maximum of some ranks
MOST_CHARTS = 20  # of metrics of the program itself
SCALE = 9999  # a cell is the nearest integer between 0 for `least` and this for `most`; -1 if there is no value


def view_of(readings: RunReadings, heats: Sequence[str] = ()) -> dict[str, Any]:
    """Return the view of a run as JSON; `heats` names the metrics of its heat maps, by default the first known one."""
    grid = readings.grid or WindowGrid()
    means = {name: grid.means(metric) for name, metric in HEAT.items()}
    known = [name for name, values in means.items() if np.isfinite(values).any()]
    own: dict[str, list[Any]] = {**readings.own.points}
    tokens, pace = _mean(grid.means(windows.TOKENS)) * len(grid.hosts), _mean(grid.means(PACE))
    has_tokens = np.isfinite(tokens).any()
    return {
        "verdicts": [asdict(one) for one in readings.raised], "times": grid.times, "at": _numbers(_mean(grid.means(AT))),
        "metrics": known, "hosts": [grid.hosts.get(rank, "") for rank in range(len(means["step"]))],
        "heats": {name: _heat(means[name]) for name in [one for one in heats if one in known] or known[:1]},
        "parts": _parts(readings, grid, pace), "spread": _spread(known[0], means[known[0]]) if known else {},
        "rate": _numbers((tokens if has_tokens else 1) / pace), "unit": "tokens/s" if has_tokens else "steps/s",
        "step_s": _numbers(_mean(means["step"])), "memory": _memory(grid, means["memory"]),
        "loss": _curve([(one.step, one.loss) for one in readings.training] or own.pop(windows.LOSS, [])),
        "own": {name: _curve(own[name]) for name in list(own)[:MOST_CHARTS]},
        "events": sorted(_events(readings))[-MOST_EVENTS:],
        "problems": [*readings.problems, *[windows.NOT_MEASURED] * (len(grid.hosts) > 1 and "step" in known and "work" not in known)],
    }  # fmt: skip


def _mean(values: Array) -> Array:
    """Return the mean of the finite values of each column; NaN if there is none."""
    known = np.isfinite(values)
    sums, counts = np.where(known, values, 0).sum(axis=0), known.sum(axis=0)
    return np.divide(sums, counts, out=np.full(counts.shape, np.nan), where=counts > 0)


def _numbers(values: Array) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _heat(values: Array) -> dict[str, Any]:
    size = -(-len(values) // MOST_ROWS)
    rows = np.fmax.reduceat(values, range(0, len(values), size), axis=0)
    known = rows[np.isfinite(rows)]
    least, most = float(known.min()), float(known.max())
    shares = (rows - least) / ((most - least) or 1)
    # One extreme column, such as a slow start, must not hide the differences between ranks.
    low, middle, high = (float(np.quantile(known, share)) for share in (0.01, 0.5, 0.995))
    return {
        "ranks_per_row": size, "least": least, "most": most, "low": low, "high": max(high, 1.2 * middle) or 1.0,
        "cells": np.where(np.isfinite(rows), np.rint(np.nan_to_num(shares) * SCALE), -1).astype(int).tolist(),
    }  # fmt: skip


def _parts(readings: RunReadings, grid: WindowGrid, pace: Array) -> dict[str, list[float | None]]:
    """Return what a step consists of, as the mean of all ranks in seconds. Saves are from the save log."""
    found = {name.removesuffix("_s"): _mean(grid.means(name)) for name in PARTS}
    found = {name: values for name, values in found.items() if np.isfinite(values).any()}
    if found:
        found["save"] = np.zeros(len(pace))
        for save in readings.saves:
            column = int(max(-1, (save.began_at - grid.began_s) // grid.slot_s))
            if 0 <= column < len(pace):
                found["save"][column] += save.waited_s * pace[column] / grid.slot_s
        found["other"] = np.maximum(0, pace - sum(np.nan_to_num(values) for values in found.values()))
    return {name: _numbers(values) for name, values in found.items()}


def _spread(name: str, values: Array) -> dict[str, Any]:
    """Return the slowest and the median rank of each column."""
    order, columns = np.argsort(values, axis=0), np.arange(values.shape[1])  # NaN is last
    last = np.maximum(0, np.isfinite(values).sum(axis=0) - 1)
    slowest, median = order[last, columns], order[last // 2, columns]
    return {
        "metric": name, "rank": slowest.tolist(), "slowest": _numbers(values[slowest, columns]),
        "median": _numbers(values[median, columns]),
    }  # fmt: skip


def _memory(grid: WindowGrid, values: Array) -> dict[str, list[float | None]]:
    """Return the resident memory of the ranks of the nodes that use most, in bytes."""
    nodes = {host: np.zeros(values.shape[1]) for host in grid.hosts.values()}
    for rank, host in grid.hosts.items():
        nodes[host] += np.nan_to_num(values[rank])
    most = sorted(nodes, key=lambda host: -nodes[host].max())[:MOST_NODES]
    return {host: _numbers(np.where(nodes[host] > 0, nodes[host], np.nan)) for host in most if nodes[host].any()}


def _curve(points: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Return mean and maximum of a metric by step, with the linear trend of the newer half; points are (step, value, ...)."""
    if not points:
        return {}
    edges = np.unique(np.linspace(0, len(points), min(COLUMNS, len(points)), endpoint=False).astype(int))
    values, steps = np.array([one[1] for one in points]), np.array([points[edge][0] for edge in edges], float)
    mean = np.add.reduceat(values, edges) / np.diff([*edges, len(points)])
    trend, slope, recent = np.full(len(mean), np.nan), None, np.flatnonzero(np.isfinite(mean))[-len(mean) // 2 :]
    if len(recent) > 2:
        slope, start = np.polyfit(steps[recent], mean[recent], 1).tolist()
        trend[recent[0] :] = start + slope * steps[recent[0] :]
    found = {"step": steps, "mean": mean, "highest": np.fmax.reduceat(values, edges), "trend": trend}
    return {"slope": slope} | {name: _numbers(each) for name, each in found.items()}


def _events(readings: RunReadings) -> Iterator[tuple[float, str, str]]:
    """Yield time, kind and description of what happened."""
    for number, (start, end) in readings.attempts.items():
        for time, what in (
            (start and start.time, start and f"started: {start.ranks} ranks, {start.nodes} nodes"),
            (end and end.time, end and f"ended: {end.cause}: {end.blaming(end.reason)}"),
        ):
            if time:
                yield seconds_since_epoch(time), "attempt", f"{number} {what}"
    for save in readings.saves:
        done = f"failed: {save.error}" if save.error else f"steps waited {save.waited_s:.1f} s"
        yield save.ended_at, "save", f"step {save.step}: {done}"
    for verdict in readings.verdicts:
        yield seconds_since_epoch(verdict.time), "verdict", line_of_verdict(verdict)

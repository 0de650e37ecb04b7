"""What the page, the report and the terminal show of a run, computed from its readings. Every part has a bounded size."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from toolkit.metrics.training import TrainRecord
from toolkit.metrics.verdicts import Verdict, line_of_verdict, names_of_ranks
from toolkit.metrics.windows import (
    BACKWARD,
    DATA,
    DEVICE,
    EXPOSED,
    FORWARD,
    OPTIMIZER,
    RSS,
    STEP,
    TOKENS,
    WORK,
    WORK_CPU,
)
from toolkit.observe.readings import RunReadings
from toolkit.observe.window_grid import AT, COLUMNS, PACE, Array, WindowGrid

__all__ = ["HEAT", "heat_metric", "view_of", "worst_rows"]

# The metrics of the heat map, in the order of the choice; the first one that the run has is the default.
HEAT = {
    "work": WORK, "CPU time of work": WORK_CPU, "step": STEP, "data": DATA, "exposed": EXPOSED, "memory": RSS,
    "GPU memory": DEVICE,
}  # fmt: skip
PARTS = {"data": DATA, "forward": FORWARD, "backward": BACKWARD, "exposed": EXPOSED, "optimizer": OPTIMIZER}
MOST_ROWS = 1024  # of the heat map; a row of a larger run has the maximum of some ranks
MOST_EVENTS = 200
MOST_HOSTS = 8
_CODES = 65534  # of a value in the heat map; 0 is a missing value


def view_of(readings: RunReadings, heats: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON of a run; `heats` names the metrics whose heat maps it contains, by default the first known one."""
    grid = readings.grid or WindowGrid()
    known = [name for name, metric in HEAT.items() if np.isfinite(grid.means(metric)).any()]
    chosen = [name for name in heats if name in known] or known[:1]
    return {
        "attempt": readings.attempt, "verdicts": [_verdict(one) for one in readings.raised],
        "times": grid.times, "slot_s": grid.slot_s, "at": _numbers(_mean(grid.means(AT))),
        "metrics": known, "heats": {name: _heat(grid.means(HEAT[name])) for name in chosen},
        "ranks": len(grid.hosts), "hosts": [grid.hosts.get(rank, "") for rank in range(len(grid.means(AT)))],
        "parts": _parts(readings, grid), "spread": _spread(grid, known), "rate": _rate(grid),
        "step_s": _numbers(_mean(grid.means(STEP))), "memory": _memory(grid), "loss": _loss(readings.training),
        "events": sorted(_events(readings), key=lambda one: one[0])[-MOST_EVENTS:], "problems": readings.problems,
    }  # fmt: skip


def heat_metric(grid: WindowGrid) -> str:
    """Return the metric that shows slow ranks; "" if there are no windows."""
    return next((name for name in ("work", "CPU time of work", "step") if np.isfinite(grid.means(HEAT[name])).any()), "")


def worst_rows(grid: WindowGrid, name: str, rows: int, columns: int) -> tuple[list[int], Array]:
    """Return the ranks whose newest values exceed the median rank most, in order, and their values by column."""
    values = grid.means(HEAT[name])
    columns = min(columns, values.shape[1])
    edges = np.linspace(0, values.shape[1], columns, endpoint=False).astype(int)
    known = np.isfinite(values)
    counts = np.add.reduceat(known, edges, axis=1, dtype=np.intp)
    sums = np.add.reduceat(np.where(known, values, 0), edges, axis=1)
    shown = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    recent = _mean(shown[:, -max(1, columns // 6) :], axis=1)
    worst = np.sort(np.argsort(-np.nan_to_num(recent, nan=-1.0), kind="stable")[:rows])
    return worst.tolist(), shown[worst]


def _mean(values: Array, axis: int = 0) -> Array:
    """Return the mean of the finite values; NaN if there is none."""
    known = np.isfinite(values)
    counts = known.sum(axis=axis)
    return np.divide(np.where(known, values, 0).sum(axis=axis), counts, out=np.full(counts.shape, np.nan), where=counts > 0)


def _numbers(values: Array) -> list[float | None]:
    """Return values as JSON: 4 significant digits, and null if not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _heat(values: Array) -> dict[str, Any]:
    size = -(-len(values) // MOST_ROWS)
    rows = np.fmax.reduceat(values, range(0, len(values), size), axis=0)
    known = rows[np.isfinite(rows)]
    least, most = float(known.min()), float(known.max())
    codes = np.zeros(rows.shape, "<u2")
    codes[np.isfinite(rows)] = 1 + np.rint((known - least) / ((most - least) or 1) * (_CODES - 1))
    # One extreme column, such as a slow start, must not hide the differences between ranks.
    low, high, middle = (float(np.quantile(known, share)) for share in (0.01, 0.995, 0.5))
    return {
        "rows": len(rows), "ranks_per_row": size, "least": least, "most": most, "low": low, "high": max(high, 1.2 * middle),
        "cells": base64.b64encode(codes.tobytes()).decode(),
    }  # fmt: skip


def _parts(readings: RunReadings, grid: WindowGrid) -> dict[str, list[float | None]]:
    """Return what a step of the mean rank consists of, in seconds; saves are those of the save log, per step."""
    step = _mean(grid.means(PACE))
    found = {name: _mean(grid.means(metric)) for name, metric in PARTS.items()}
    found = {name: values for name, values in found.items() if np.isfinite(values).any()}
    if not found:
        return {}
    found["save"] = np.zeros(len(step))
    for save in readings.saves:
        column = int((save.went_on_at - grid.began_s) // grid.slot_s)
        if save.attempt == readings.attempt and 0 <= column < len(step) and math.isfinite(step[column]):
            found["save"][column] += save.waited_s * step[column] / grid.slot_s
    found["other"] = np.maximum(0, step - sum(np.nan_to_num(values) for values in found.values()))
    return {name: _numbers(values) for name, values in found.items()}


def _spread(grid: WindowGrid, known: Sequence[str]) -> dict[str, Any]:
    """Return the slowest and the median rank of each column."""
    name = heat_metric(grid)
    if not name:
        return {}
    values = grid.means(HEAT[name])
    has = np.isfinite(values).any(axis=0)
    slowest = np.where(has, np.nan_to_num(values, nan=-1.0).argmax(axis=0), -1)
    median = np.full(len(has), np.nan)
    median[has] = np.nanmedian(values[:, has], axis=0)
    most = np.where(has, np.nan_to_num(values, nan=-1.0).max(axis=0), np.nan)
    return {"metric": name, "slowest": _numbers(most), "median": _numbers(median), "rank": slowest.tolist()}


def _rate(grid: WindowGrid) -> dict[str, Any]:
    steps_per_s = 1 / _mean(grid.means(PACE))
    tokens = grid.means(TOKENS)
    if not np.isfinite(tokens).any():
        return {"unit": "steps/s", "values": _numbers(steps_per_s)}
    return {"unit": "tokens/s", "values": _numbers(_mean(tokens) * len(grid.hosts) * steps_per_s)}


def _memory(grid: WindowGrid) -> dict[str, list[float | None]]:
    """Return the resident memory of the nodes that use most, in bytes."""
    values, nodes = grid.means(RSS), {}
    for host in dict.fromkeys(grid.hosts.values()):
        rows = values[[rank for rank, its in grid.hosts.items() if its == host]]
        nodes[host] = np.where(np.isfinite(rows).any(axis=0), np.nansum(rows, axis=0), np.nan)
    most = sorted(nodes, key=lambda host: -np.nan_to_num(nodes[host]).max(initial=0))[:MOST_HOSTS]
    return {host: _numbers(nodes[host]) for host in most if np.isfinite(nodes[host]).any()}


def _loss(records: Sequence[TrainRecord]) -> dict[str, list[float | None]]:
    """Return mean, maximum and trend of the loss, by step, and the seconds of a step."""
    if not records:
        return {}
    edges = np.unique(np.linspace(0, len(records), min(COLUMNS, len(records)), endpoint=False).astype(int))
    losses = np.array([record.loss for record in records])
    counts = np.diff([*edges, len(records)])
    found = {
        "step": np.array([records[edge].step for edge in edges], float), "loss": np.add.reduceat(losses, edges) / counts,
        "most": np.maximum.reduceat(losses, edges),
        "seconds": np.add.reduceat(np.array([record.seconds for record in records]), edges) / counts,
    }  # fmt: skip
    trend, smooth = [], math.nan
    for value in found["loss"].tolist():
        smooth = value if not math.isfinite(smooth) else smooth + 0.1 * (value - smooth) if math.isfinite(value) else smooth
        trend.append(smooth)
    return {name: _numbers(values) for name, values in (found | {"trend": np.array(trend)}).items()}


def _verdict(one: Verdict) -> dict[str, Any]:
    """Return a verdict in the order in which the page shows it."""
    return {
        "severity": one.severity, "kind": one.kind, "message": one.message, "change": one.change, "ranks": one.ranks[:MOST_ROWS],
        "host": one.host, "line": line_of_verdict(one), "cost_s_per_hour": one.cost_s_per_hour, "time": _seconds(one.time),
    }  # fmt: skip


def _events(readings: RunReadings) -> Iterator[tuple[float, str, str]]:
    """Yield time, kind and description of what happened."""
    for number, (start, end) in readings.attempts.items():
        if start is not None:
            yield _seconds(start.time), "attempt", f"attempt {number} started: {start.ranks} ranks on {start.nodes} nodes"
        if end is not None:
            yield _seconds(end.time), "attempt", f"attempt {number} ended: {end.cause}, {end.blaming(end.reason)}"
    for save in readings.saves:
        done = f"failed: {save.error}" if save.error else f"waited {save.waited_s:.1f} s"
        yield save.ended_at, "save", f"step {save.step} ({save.why}), {done}"
    for verdict in readings.verdicts:
        yield _seconds(verdict.time), "verdict", line_of_verdict(verdict)


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()

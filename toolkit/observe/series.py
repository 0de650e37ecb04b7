"""The series for Prometheus: `data/series.json` has their types, help, records, values, labels, and how to merge values."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from toolkit.metrics import windows
from toolkit.metrics.records import RecordTail
from toolkit.observe.readings import RunReadings
from toolkit.rundir.attempt_records import AttemptRecord

__all__ = ["data_file", "records_of", "text_of"]

_MOST_NAMES = 16  # of metrics that a program or a validation names
_PHASES = (
    windows.DATA,
    windows.FORWARD,
    windows.BACKWARD,
    windows.EXPOSED,
    windows.BUBBLE,
    windows.OPTIMIZER,
    windows.SAVE,
)
_QUANTILES = (("0.5", "median"), ("0.95", "p95"), ("1", "maximum"))


def _mean(values: Sequence[float]) -> float:
    """Return the mean; infinity if the sum is too large, for which `fmean` raises an error."""
    return sum(values) / len(values)


_MERGED: dict[str, Callable[[Sequence[float]], float]] = {"sum": sum, "mean": _mean, "min": min, "max": max}
_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', **dict.fromkeys(map(chr, (*range(32), 127)), " ")})
_NOT_FINITE = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}

Records = Mapping[str, Iterable[Mapping[str, Any]]]  # by the names that the table uses


@cache
def data_file(name: str) -> str:
    """Return the content of a file in `data/`."""
    return files("toolkit.observe").joinpath("data", name).read_text(encoding="utf-8")


def text_of(runs: Sequence[tuple[Mapping[str, str], Records]]) -> str:
    """Return the text of the series of runs, each with its labels and records. An absent value has no sample."""
    text = ""
    for name, (kind, about, of, value, by, merge) in json.loads(data_file("series.json")).items():
        groups = defaultdict(list)
        for labels, records in runs:
            for one in records.get(of, ()):
                if one.get(value) is not None:
                    groups[(*labels.items(), *((label, str(one.get(label, ""))) for label in by))].append(one[value])
        text += f"# HELP {name} {about}\n# TYPE {name} {kind}\n" if groups else ""
        for key, values in groups.items():
            shown = dict(key)
            suffix, merged = shown.pop("suffix", ""), repr(float(_MERGED[merge](values)))
            joined = ",".join(f'{label}="{each.translate(_ESCAPED)}"' for label, each in shown.items() if each)
            text += f"{name}{suffix}{{{joined}}} {_NOT_FINITE.get(merged, merged)}\n"
    return text


def records_of(readings: RunReadings, end: AttemptRecord | None, most_ranks: int) -> Records:
    """Return the records of a run. After the end of its attempt, nothing describes its ranks and nodes any more."""
    last: list[Mapping[str, Any]] = [vars(one) for one in readings.training[-1:]]
    made = next((readings.windows[rank] for rank in sorted(readings.windows)), [])
    newest = [each[-1] for each in readings.windows.values() if end is None]
    newest.sort(key=lambda one: (-(one.mean(windows.WORK) or one.mean(windows.WORK_CPU)), one.rank))
    steps = [one.metrics[windows.STEP] for one in newest if windows.STEP in one.metrics]
    work = [(one.mean(windows.WORK), one.mean(windows.STEP)) for one in newest if windows.WORK in one.metrics]
    ranks: list[Mapping[str, Any]] = [
        {name: one.mean(name) for name in one.metrics} | vars(one)
        | {"step": one.last_step, "ended_s": one.began_s + one.seconds} for one in newest
    ]  # fmt: skip
    alerts = RecordTail(readings.run.metrics / "alerts.jsonl", lambda line: dict(json.loads(line))).new()
    found: dict[str, list[Mapping[str, Any]]] = {
        "training": last, "losses": last or ranks, "steps": last + ranks, "ranks": ranks[:most_ranks],
        "made": [vars(one) for one in made],
        "step_seconds": [
            *({"suffix": "_sum", "value": one.mean(windows.STEP) * one.steps} for one in made),
            *({"suffix": "_count", "value": one.steps} for one in made),
            *({"quantile": name, "value": _mean([getattr(one, of) for one in steps])} for name, of in _QUANTILES if steps),
        ],
        "phases": [{"phase": name.removesuffix("_s"), "value": one.get(name)} for one in ranks for name in _PHASES],
        "efficiency": [{"value": done / whole} for done, whole in work if whole],
        "validation": _named(pair for one in readings.validations[-1:] for pair in one.means.items()),
        "user": _named((name, one.mean(name)) for one in newest for name in one.metrics if name not in windows.COLUMNS),
        "saves": [{**vars(one), "count": 1, "failed": one.error is not None} for one in readings.saves],
        "saved": [{"value": one.ended_at} for one in readings.saves if one.error is None],
        "raised": [{**vars(one), "count": 1, "cost": one.cost_s_per_hour / 3600} for one in readings.raised if not end],
        "alerts": [{**one, "count": 1} for one in {one.get("rule"): one for one in alerts}.values()],
        "result": [{"state": end.state, "exit_code": end.exit_code}] if end is not None and end.final else [],
        "problems": [{"value": len(readings.problems)}],
    }  # fmt: skip
    for sample in (one for samples in readings.samples.values() for one in samples if end is None):
        found.setdefault(type(sample).__name__, []).append(vars(sample))
    return found


def _named(values: Iterable[tuple[str, float]]) -> list[Mapping[str, Any]]:
    """Return values with names of the user, which may contain any characters."""
    legal = [(re.sub(r"[^a-zA-Z0-9_]", "_", name), value) for name, value in values]
    kept = sorted({name for name, _ in legal})[:_MOST_NAMES]
    return [{"name": name, "value": value} for name, value in legal if name in kept]

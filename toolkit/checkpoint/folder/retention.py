"""Which checkpoints to keep: the newest few, every N-th step for ever, and the best by a metric.

A checkpoint that fails the quick check does not count as kept, so that the requested number of good ones remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from toolkit.checkpoint.folder.commit import move_aside
from toolkit.checkpoint.folder.verify import is_whole
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.layout import MANIFEST, committed_steps
from toolkit.checkpoint.format.manifest_file import read_body
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.terminal.talk import say_beside

__all__ = ["Retention"]

METRIC = "metric"  # in a manifest's `state`: {"metric": {"name": "loss", "value": 1.23}}


class RetentionSettings(Protocol):
    """The keys of the job's table `[checkpoint]` that retention uses."""

    keep_last: int
    keep_every: int
    keep_best: int
    best_mode: Literal["min", "max"]


@dataclass(frozen=True)
class Retention:
    """Which committed checkpoints to keep: those that any of the keys keeps.

    last: the newest ones, at least 1.
    every: keeps steps that are a multiple of it for ever; 0 keeps none.
    best: the number of those with the best metric; never one without a metric, or with NaN.
    """

    last: int = 3
    every: int = 0
    best: int = 0
    lower_is_better: bool = True

    @classmethod
    def of(cls, settings: RetentionSettings) -> Retention:
        """The retention of the job's table `[checkpoint]`."""
        return cls(settings.keep_last, settings.keep_every, settings.keep_best, settings.best_mode == "min")

    def __post_init__(self) -> None:
        for name, least in (("last", 1), ("every", 0), ("best", 0)):
            if getattr(self, name) < least:
                raise ToolkitError(
                    f"keep_{name} is {getattr(self, name)}",
                    where=f"checkpoint.keep_{name}",
                    fix="keep 1 checkpoint or more" if least else "choose 0 or more",
                )


def surplus_steps(
    metrics: Mapping[int, float | None],
    is_whole: Callable[[int], bool],
    retention: Retention,
    in_use: Collection[int] = (),
) -> list[int]:
    """The steps to remove, lowest first; none if fewer than `retention.last` are complete.

    Damaged ones newer than the oldest of those stay, too: a load renames them, and deletion would destroy the evidence.

    Args:
        metrics: every committed step, with the metric that its checkpoint recorded.
        is_whole: called only for the newest and the best steps, until enough are complete.
        in_use: steps to keep at any age.
    """
    newest = _first(sorted(metrics, reverse=True), is_whole, retention.last)
    if len(newest) < retention.last:
        return []
    rated = {step: value for step, value in metrics.items() if value is not None and not math.isnan(value)}
    sign = 1 if retention.lower_is_better else -1
    # If values are equal, the earliest step is the best: later ones do not improve on it.
    by_worth = sorted(rated, key=lambda step: (sign * rated[step], step))
    stay = {*_first(by_worth, is_whole, retention.best), *in_use}
    return [
        step
        for step in sorted(metrics)
        if step < newest[-1] and step not in stay and not (retention.every and step % retention.every == 0)
    ]


def _first(steps: list[int], is_whole: Callable[[int], bool], count: int) -> list[int]:
    complete: list[int] = []
    for step in steps:
        if len(complete) == count:
            break
        if is_whole(step):
            complete.append(step)
    return complete


def surplus_folders(
    directory: Path, retention: Retention, in_use: Collection[int] = (), is_whole: Callable[[Path], bool] | None = None
) -> list[Path]:
    """The committed checkpoints to remove, oldest first; `is_whole` is by default the quick check. Changes nothing.

    Raises OwnFailureError if this host cannot read a checkpoint that affects the choice.
    """
    folders = committed_steps(directory)
    metrics = {step: recorded_metric(folder) if retention.best else None for step, folder in folders.items()}
    whole = is_whole or _is_whole
    return [folders[step] for step in surplus_steps(metrics, lambda step: whole(folders[step]), retention, in_use)]


def retain(directory: Path, retention: Retention, attempt: int, in_use: Collection[int] = ()) -> list[Path]:
    """Rename the surplus checkpoints so that nothing loads them, and return these folders, for deletion.

    Keeps all, and logs why, if this host cannot read a checkpoint that affects the choice.
    """
    try:
        surplus = surplus_folders(directory, retention, in_use)
    except OwnFailureError as error:
        say_beside(f"keeping older checkpoints: {error}")
        return []
    return [move_aside(folder, "removed", attempt) for folder in surplus]


def metric_of(state: Mapping[str, Any]) -> float | None:
    """The value of the metric in a checkpoint's `state`; None if it has none."""
    recorded = state.get(METRIC)
    value = recorded.get("value") if isinstance(recorded, dict) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer above the largest float
        return math.inf if value > 0 else -math.inf


def recorded_metric(folder: Path) -> float | None:
    """The metric of a committed checkpoint; None if missing or damaged, OwnFailureError or OSError if not readable."""
    try:
        stat = (folder / MANIFEST).stat()
    except FileNotFoundError:
        return None
    return _metric_in(folder, (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=4096)
def _metric_in(folder: Path, _version: tuple[int, int, int]) -> float | None:
    """The metric in a manifest. Cached: a manifest may be large, and many are kept for ever."""
    try:
        state = jsonvalues.decode(read_body(folder).get("state", {}), "state")
        return metric_of(state) if isinstance(state, dict) else None
    except OwnFailureError:
        raise
    except ToolkitError:  # damaged, or of another version of the format
        return None


def _is_whole(folder: Path) -> bool:
    """Whether a checkpoint passes the quick check."""
    try:
        return is_whole(folder)
    except OwnFailureError:
        raise
    except ToolkitError:  # another version of toolkit wrote it, which this one cannot check
        return False

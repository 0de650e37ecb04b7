"""Decides which checkpoints to keep: the newest few, those at every N-th step, and the best by a metric.

Checkpoints that fail the quick check do not count, so that the requested number of undamaged ones remains.
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

METRIC = "metric"  # a key in the `state` of a manifest: {"metric": {"name": "loss", "value": 1.23}}


class RetentionSettings(Protocol):
    """The keys of the `[checkpoint]` table of a job file that affect retention."""

    keep_last: int
    keep_every: int
    keep_best: int
    best_mode: Literal["min", "max"]


@dataclass(frozen=True)
class Retention:
    """Rules for which committed checkpoints to keep: those that at least one rule keeps.

    last: the number of newest checkpoints to keep, at least 1.
    every: keeps steps that are a multiple of it permanently; 0 disables this rule.
    best: the number of checkpoints with the best metric to keep; those without a metric, or with NaN, do not count.
    """

    last: int = 3
    every: int = 0
    best: int = 0
    lower_is_better: bool = True

    @classmethod
    def of(cls, settings: RetentionSettings) -> Retention:
        """Return the rules that the `[checkpoint]` table of a job file sets."""
        return cls(settings.keep_last, settings.keep_every, settings.keep_best, settings.best_mode == "min")

    def __post_init__(self) -> None:
        for name, least in (("last", 1), ("every", 0), ("best", 0)):
            if getattr(self, name) < least:
                raise ToolkitError(
                    f"expected at least {least}, got {getattr(self, name)}",
                    where=f"checkpoint.keep_{name}",
                    fix=f"set checkpoint.keep_{name} to at least {least}",
                )


def surplus_steps(
    metrics: Mapping[int, float | None],
    is_whole: Callable[[int], bool],
    retention: Retention,
    in_use: Collection[int] = (),
) -> list[int]:
    """Return the steps to remove, lowest first; none if fewer than `retention.last` checkpoints are complete.

    Keeps damaged checkpoints that are newer than the oldest of these, because deletion would destroy the evidence.

    Args:
        metrics: every committed step, with the metric that its checkpoint recorded.
        is_whole: called only for the newest and the best steps, until enough are complete.
        in_use: steps to keep regardless of the rules.
    """
    newest = _first(sorted(metrics, reverse=True), is_whole, retention.last)
    if len(newest) < retention.last:
        return []
    rated = {step: value for step, value in metrics.items() if value is not None and not math.isnan(value)}
    sign = 1 if retention.lower_is_better else -1
    # Among equal values the earliest step is the best, because later ones do not improve on it.
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
    """List the checkpoints to remove, lowest step first. Removes nothing. By default `is_whole` is the quick check.

    Raises OwnFailureError if this host cannot read a checkpoint that affects the choice.
    """
    folders = committed_steps(directory)
    metrics = {step: recorded_metric(folder) if retention.best else None for step, folder in folders.items()}
    whole = is_whole or _is_whole
    return [folders[step] for step in surplus_steps(metrics, lambda step: whole(folders[step]), retention, in_use)]


def retain(directory: Path, retention: Retention, attempt: int, in_use: Collection[int] = ()) -> list[Path]:
    """Rename the surplus checkpoints so that no load uses them, and return their new paths, for deletion.

    If this host cannot read a checkpoint that affects the choice, keeps all of them and logs the reason.
    """
    try:
        surplus = surplus_folders(directory, retention, in_use)
    except OwnFailureError as error:
        say_beside(f"keeping older checkpoints: one could not be read: {error}")
        return []
    return [move_aside(folder, "removed", attempt) for folder in surplus]


def metric_of(state: Mapping[str, Any]) -> float | None:
    """Return the value of the metric in the `state` of a checkpoint, or None if it has none."""
    recorded = state.get(METRIC)
    value = recorded.get("value") if isinstance(recorded, dict) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # the metric is an integer above the largest float
        return math.inf if value > 0 else -math.inf


def recorded_metric(folder: Path) -> float | None:
    """Return the metric of a checkpoint, None if missing or damaged. Raises OwnFailureError, OSError if unreadable."""
    try:
        stat = (folder / MANIFEST).stat()
    except FileNotFoundError:
        return None
    return _metric_in(folder, (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=4096)
def _metric_in(folder: Path, _version: tuple[int, int, int]) -> float | None:
    """Return the metric in a manifest. Cached, because manifests may be large and are read at every save."""
    try:
        state = jsonvalues.decode(read_body(folder).get("state", {}), "state")
        return metric_of(state) if isinstance(state, dict) else None
    except OwnFailureError:
        raise
    except ToolkitError:  # the manifest is damaged, or has another format version
        return None


def _is_whole(folder: Path) -> bool:
    """Return whether a checkpoint passes the quick check."""
    try:
        return is_whole(folder)
    except OwnFailureError:
        raise
    except ToolkitError:  # this version of toolkit cannot check another format version
        return False

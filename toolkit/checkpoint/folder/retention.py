"""Which checkpoints stay: the newest few, every N-th step for ever, and the best by a metric.

The choice is a pure function of what stands in the folder. A checkpoint that is not whole at a quick look counts for
none that stays, so that whatever is removed, as many good ones as were asked for are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from toolkit.checkpoint.folder.commit import set_aside
from toolkit.checkpoint.folder.verify import is_whole
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.layout import MANIFEST, committed_steps
from toolkit.checkpoint.format.manifest_file import read_body
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.talk import say_beside

METRIC = "metric"  # in a manifest's `state`: {"metric": {"name": "loss", "value": 1.23}}


class RetentionSettings(Protocol):
    """What is read of the job's table `[checkpoint]`."""

    keep_last: int
    keep_every: int
    keep_best: int
    best_mode: Literal["min", "max"]


@dataclass(frozen=True)
class Retention:
    """What stays of the committed checkpoints, each key by itself: one that any of them keeps, stays.

    last: the newest ones, at least 1.
    every: those whose step is a multiple of it stay for ever; 0 keeps none so.
    best: as many with the best metric; those without a metric, or with NaN, are never among them.
    """

    last: int = 3
    every: int = 0
    best: int = 0
    lower_is_better: bool = True

    @classmethod
    def of(cls, settings: RetentionSettings) -> Retention:
        """As the job's table `[checkpoint]` says."""
        return cls(settings.keep_last, settings.keep_every, settings.keep_best, settings.best_mode == "min")

    def __post_init__(self) -> None:
        for name, least in (("last", 1), ("every", 0), ("best", 0)):
            if getattr(self, name) < least:
                raise ToolkitError(
                    f"keep_{name} is {getattr(self, name)}",
                    where=f"checkpoint.keep_{name}",
                    fix="keep 1 checkpoint or more" if least else "give 0 or more",
                )


def surplus_steps(
    metrics: Mapping[int, float | None],
    is_whole: Callable[[int], bool],
    retention: Retention,
    in_use: Collection[int] = (),
) -> list[int]:
    """The steps that go, oldest first.

    Where fewer than `retention.last` are whole, none goes. Damaged ones newer than the oldest of those stay, too: a
    load sets them aside, and a deletion would take away what there is to look at.

    Args:
        metrics: every committed step, with the metric that its checkpoint recorded.
        is_whole: asked about the newest and the best only, until enough are found.
        in_use: steps that stay whatever their age.
    """
    newest = _first(sorted(metrics, reverse=True), is_whole, retention.last)
    if len(newest) < retention.last:
        return []
    rated = {step: value for step, value in metrics.items() if value is not None and not math.isnan(value)}
    sign = 1 if retention.lower_is_better else -1
    # Of equal ones the earliest is the best: a later one is no improvement.
    by_worth = sorted(rated, key=lambda step: (sign * rated[step], step))
    stay = {*_first(by_worth, is_whole, retention.best), *in_use}
    return [
        step
        for step in sorted(metrics)
        if step < newest[-1] and step not in stay and not (retention.every and step % retention.every == 0)
    ]


def _first(steps: list[int], is_whole: Callable[[int], bool], count: int) -> list[int]:
    found: list[int] = []
    for step in steps:
        if len(found) == count:
            break
        if is_whole(step):
            found.append(step)
    return found


def surplus_folders(
    directory: Path, retention: Retention, in_use: Collection[int] = (), is_whole: Callable[[Path], bool] | None = None
) -> list[Path]:
    """The committed checkpoints in a `checkpoints` folder that go, oldest first; nothing is touched.

    Args:
        is_whole: tells whether a checkpoint counts as kept; by a quick look, if not given.

    Raises:
        OwnFailureError: this host cannot read one that decides.
    """
    folders = committed_steps(directory)
    metrics = {step: recorded_metric(folder) if retention.best else None for step, folder in folders.items()}
    whole = is_whole or _is_whole
    return [folders[step] for step in surplus_steps(metrics, lambda step: whole(folders[step]), retention, in_use)]


def retain(directory: Path, retention: Retention, attempt: int, in_use: Collection[int] = ()) -> list[Path]:
    """Give the surplus names that nothing loads, and return these folders, which may be deleted.

    Where this host cannot read one that decides, all stay, and why is told.
    """
    try:
        surplus = surplus_folders(directory, retention, in_use)
    except OwnFailureError as error:
        say_beside(f"older checkpoints stay: {error}")
        return []
    return [set_aside(folder, "removed", attempt) for folder in surplus]


def metric_of(state: Mapping[str, Any]) -> float | None:
    """The value of the metric in a checkpoint's `state`; None where it recorded none."""
    recorded = state.get(METRIC)
    value = recorded.get("value") if isinstance(recorded, dict) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number past the largest float
        return math.inf if value > 0 else -math.inf


def recorded_metric(folder: Path) -> float | None:
    """The metric of a committed checkpoint; None where it recorded none, or is damaged.

    Raises:
        OwnFailureError, OSError: this host cannot read it.
    """
    try:
        stat = (folder / MANIFEST).stat()
    except FileNotFoundError:
        return None
    return _metric_in(folder, (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=4096)
def _metric_in(folder: Path, _version: tuple[int, int, int]) -> float | None:
    """A manifest may be large, and those that stay for ever are many: each is read once."""
    try:
        state = jsonvalues.decode(read_body(folder).get("state", {}), "state")
        return metric_of(state) if isinstance(state, dict) else None
    except OwnFailureError:
        raise
    except ToolkitError:  # damaged, or of another version of the format
        return None


def _is_whole(folder: Path) -> bool:
    """True when a quick look finds nothing wrong."""
    try:
        return is_whole(folder)
    except OwnFailureError:
        raise
    except ToolkitError:  # another version of toolkit wrote it, and nobody here can look into it
        return False

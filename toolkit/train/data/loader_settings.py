"""The number of loader workers: configured, or chosen by a short measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from toolkit.terminal.talk import say
from toolkit.train.data.reading import BatchReader, Plan, ReadAhead

CANDIDATES = (0, 1, 2, 4)
BUDGET_S = 2.0
MOST_TIMED = 50  # batches for each number of workers
TIE = 1.1  # more workers must be faster by more than this ratio, which allows for noise


class DataSettings(Protocol):
    """The keys of `[data]` that the loader uses."""

    @property
    def workers(self) -> int | Literal["auto"]: ...
    @property
    def prefetch(self) -> int: ...


@dataclass(frozen=True)
class LoaderSettings:
    """`workers` processes read `prefetch` batches each in advance; with 0 workers, the rank reads on demand."""

    workers: int | Literal["auto"] = "auto"
    prefetch: int = 2

    @classmethod
    def of(cls, data: DataSettings) -> LoaderSettings:
        """Return the settings of the job's table `[data]`."""
        return cls(data.workers, data.prefetch)


def choose_loader_settings(
    reader: BatchReader,
    plan: Plan,
    *,
    first: int = 0,
    prefetch: int = 2,
    candidates: Sequence[int] = CANDIDATES,
    budget_s: float = BUDGET_S,
    tell: Callable[[str], None] = say,
) -> LoaderSettings:
    """Time some batches with each number of workers; return and log the fastest, unless the source allows only one.

    Args:
        candidates: numbers of workers; those above the number of CPUs of this rank are skipped.
        first: the global sample at which the trial steps start.
        budget_s: seconds for all candidates together, not counting the start of the workers.
    """
    cpus = len(os.sched_getaffinity(0))
    most = reader.source.most_workers
    if most == 0:
        return LoaderSettings(0, prefetch)
    if reader.source.count is None:
        # A trial would consume samples of the stream.
        workers = 1 if cpus > 1 else 0
        tell(f"the stream is read by {_workers(workers)}")
        return LoaderSettings(workers, prefetch)
    tried = [workers for workers in candidates if workers <= cpus and (most is None or workers <= most)] or [0]
    seconds = {
        workers: _seconds_per_batch(reader, plan, first, workers, prefetch, budget_s / len(tried)) for workers in tried
    }
    best = min(seconds.values())
    chosen = min(workers for workers, taken in seconds.items() if taken <= TIE * best)
    others = ", ".join(f"{1000 * taken:.2f} with {workers}" for workers, taken in seconds.items() if workers != chosen)
    against = f" (ms with other numbers of workers: {others})" if others else ""
    tell(f"batches are read by {_workers(chosen)}, {1000 * seconds[chosen]:.2f} ms each{against}")
    return LoaderSettings(chosen, prefetch)


def _workers(count: int) -> str:
    return "the rank itself" if count == 0 else "1 worker process" if count == 1 else f"{count} worker processes"


def _seconds_per_batch(
    reader: BatchReader, plan: Plan, first: int, workers: int, prefetch: int, budget_s: float
) -> float:
    """Return the seconds per batch in the steady state, not counting batches that were read ahead during warm-up."""
    requests = reader.requests(plan.ranges(first))
    if workers == 0:
        return _timed(lambda: reader.read(next(requests)), 1, budget_s)
    ahead = ReadAhead(reader, requests, workers=workers, prefetch=prefetch, pin_memory=False)
    try:
        return _timed(lambda: next(ahead), workers * prefetch, budget_s)
    finally:
        ahead.close()


def _timed(read: Callable[[], object], warm_up: int, budget_s: float) -> float:
    began = time.monotonic()
    for number in range(1, warm_up + 1):
        read()
        if (now := time.monotonic() - began) > budget_s:
            return now / number
    warm, number = time.monotonic(), 0
    while number < MOST_TIMED and (number == 0 or time.monotonic() - began < budget_s):
        read()
        number += 1
    return (time.monotonic() - warm) / number

"""Batches in their order, read by worker processes ahead of the step that needs them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, get_worker_info

from toolkit.errors import ToolkitError
from toolkit.train.data.order import SampleOrder, share, split
from toolkit.train.data.source import Source
from toolkit.train.data.travel import packed, unpacked
from toolkit.train.data.worker_life import kill, settle, workers_of

_AT_ONCE = 4096  # samples whose positions are worked out together


@dataclass(frozen=True)
class Plan:
    """Which samples a rank takes: its share of each global batch, in micro-batches of `micro_batch`; 0 is the whole share."""

    batch: int
    micro_batch: int = 0
    rank: int = 0
    size: int = 1

    def ranges(self, first: int) -> Iterator[range]:
        """The rank's micro-batches, without end, of the steps from global sample `first` on."""
        while True:
            yield from split(share(first, self.batch, self.rank, self.size), self.micro_batch)
            first += self.batch

    def first_of(self, samples: range) -> int | None:
        """The global sample at which a step begins whose first micro-batch is `samples`; None where there is no such."""
        first = samples.start - self.batch * self.rank // self.size
        return first if first >= 0 and next(self.ranges(first)) == samples else None


@dataclass(frozen=True)
class Answer:
    """What reading a batch gave. Processes exchange it as a dict, in which torch pins the tensors."""

    batch: Any
    skips: list[str]


class Request(NamedTuple):
    """A batch to read: its global samples, and their positions in the source."""

    samples: range
    positions: NDArray[np.int64]


class BatchReader(Dataset[dict[str, Any]]):
    """A whole batch as one item of a dataset, so that torch's workers read it as a whole.

    In a worker, what a dataset draws (torch, numpy, random) follows from the seed and the batch's first sample.
    """

    def __init__(self, source: Source, seed: int, *, shuffle: bool = True) -> None:
        self.source = source
        self.seed = seed
        self.packs = True  # False leaves tensors to torch, which pins them
        count = source.count
        self._order = SampleOrder(count, seed) if shuffle and count is not None else None

    def __getitem__(self, request: Request) -> dict[str, Any]:
        in_worker = get_worker_info() is not None
        if in_worker:
            _seed_worker(self.seed, request.samples.start)
        try:
            batch = self.source.take(request.positions)
        except ToolkitError as error:
            # torch would bring it to the rank as a traceback of this process.
            return {"failed": (type(error), error.message, error.where, error.fix)}
        if in_worker and self.packs:
            batch = packed(batch)
        return {"batch": batch, "skips": self.source.drain_skips()}

    def requests(self, ranges: Iterable[range]) -> Iterator[Request]:
        """What to read for these ranges of global samples.

        A permutation costs hardly more for a thousand samples than for ten, so that some ranges are asked for at once.
        """
        waiting = iter(ranges)
        at_once = 1  # a range that is asked for alone does not wait for others
        while group := _group(waiting, at_once):
            found = self._positions(np.concatenate([np.arange(one.start, one.stop) for one in group]))
            ends = np.cumsum([len(one) for one in group])
            for samples, positions in zip(group, np.split(found, ends[:-1]), strict=True):
                yield Request(samples, positions)
            at_once = _AT_ONCE

    def request(self, samples: range) -> Request:
        """What to read for one range of global samples."""
        return next(self.requests([samples]))

    def read(self, request: Request) -> Answer:
        """Read a batch in this process."""
        return _answer(self[request])

    def _positions(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._order is not None:
            return self._order.positions(samples)
        return samples if self.source.count is None else samples % self.source.count


def _group(ranges: Iterator[range], least: int) -> list[range]:
    """The next ranges with `least` samples in all."""
    group, samples = [], 0
    for one in ranges:
        group.append(one)
        samples += len(one)
        if samples >= least:
            break
    return group


class ReadAhead:
    """One batch after the other, read by worker processes; close it to end them.

    Args:
        workers: 1 or more.
        prefetch: batches that each worker is ahead.
        pin_memory: bring the tensors into memory from which a GPU fetches them itself.
    """

    def __init__(
        self, reader: BatchReader, requests: Iterable[Request], *, workers: int, prefetch: int, pin_memory: bool
    ) -> None:
        loader: DataLoader[Any] = DataLoader(
            reader,
            sampler=_Requests(requests),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=prefetch,
            pin_memory=pin_memory,
            worker_init_fn=settle(),
            generator=torch.Generator(),  # else each start draws from the stream of the training itself
        )
        self._workers = workers
        self._batches: Iterator[dict[str, Any]] | None = iter(loader)
        self._processes = workers_of(self._batches)

    def __next__(self) -> Answer:
        assert self._batches is not None
        try:
            answer = next(self._batches)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise ToolkitError(
                f"a worker process of the loader died: {error}",
                where="data.workers",
                fix=f"{'set data.workers to 0' if self._workers == 1 else f'set data.workers below {self._workers}'}, or "
                "give the job more memory; a container may need a larger /dev/shm",
            ) from error
        return _answer(answer)

    def close(self) -> None:
        """End the workers."""
        self._batches = None  # torch asks them to end, and waits some seconds
        kill(self._processes)


@dataclass(frozen=True)
class _Requests:
    """What torch calls a sampler."""

    requests: Iterable[Request]

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def _as_it_is(item: Any) -> Any:
    return item


def _answer(item: dict[str, Any]) -> Answer:
    if "failed" in item:
        kind, message, where, fix = item["failed"]
        raise kind(message, where=where, fix=fix)
    return Answer(unpacked(item["batch"]), item["skips"])


def _seed_worker(seed: int, first: int) -> None:
    drawn = xxhash.xxh3_64_intdigest(f"{seed}:{first}".encode())
    torch.manual_seed(drawn)
    np.random.seed(drawn % 2**32)
    random.seed(drawn)

"""Read batches in order, with worker processes that read ahead of the training steps."""

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
from toolkit.train.data.order import SampleOrder, passes_of, share, split
from toolkit.train.data.source import Source
from toolkit.train.data.travel import packed, unpacked
from toolkit.train.data.worker_life import kill, settle, workers_of

_AT_ONCE = 4096  # samples whose positions are computed together


@dataclass(frozen=True)
class Plan:
    """The samples of a rank: its part of each global batch, in micro-batches of `micro_batch` (0: a single one)."""

    batch: int
    micro_batch: int = 0
    rank: int = 0
    size: int = 1

    def ranges(self, first: int) -> Iterator[range]:
        """Yield the rank's micro-batches, without end, beginning with the step at global sample `first`."""
        passes = passes_of(self.batch, self.size, self.micro_batch)
        while True:
            yield from split(share(first, self.batch, self.rank, self.size), self.micro_batch, passes)
            first += self.batch

    def first_of(self, samples: range) -> int | None:
        """Return the first global sample of the step whose first micro-batch is `samples`, or None."""
        first = samples.start - self.batch * self.rank // self.size
        return first if first >= 0 and next(self.ranges(first)) == samples else None


@dataclass(frozen=True)
class Answer:
    """The result of reading a batch. Workers send it as a dict, because torch can pin the tensors in one."""

    batch: Any
    skips: list[str]


class Request(NamedTuple):
    """A batch to read: its global samples, and their positions in the source."""

    samples: range
    positions: NDArray[np.int64]


class BatchReader(Dataset[dict[str, Any]]):
    """A torch dataset whose items are whole batches, so that a worker reads a batch in one call.

    A worker seeds torch, numpy and random for each batch, from the seed and the first sample of the batch.
    """

    def __init__(self, source: Source, seed: int, *, shuffle: bool = True) -> None:
        self.source = source
        self.seed = seed
        self.packs = True  # False keeps tensors as they are, so that torch can pin them
        count = source.count
        self._order = SampleOrder(count, seed) if shuffle and count is not None else None

    def __getitem__(self, request: Request) -> dict[str, Any]:
        in_worker = get_worker_info() is not None
        if in_worker:
            _seed_worker(self.seed, request.samples.start)
        try:
            batch = self.source.take(request.positions)
        except ToolkitError as error:
            # torch would add a traceback of this worker to the error.
            return {"failed": (type(error), error.message, error.where, error.fix)}
        if in_worker and self.packs:
            batch = packed(batch)
        return {"batch": batch, "skips": self.source.drain_skips()}

    def requests(self, ranges: Iterable[range]) -> Iterator[Request]:
        """Yield the requests for these ranges of global samples.

        Permuting a thousand samples costs hardly more than ten, so positions of several ranges are computed at once.
        """
        waiting = iter(ranges)
        at_once = 1  # the first batch must not wait for the positions of others
        while group := _group(waiting, at_once):
            found = self._positions(np.concatenate([np.arange(one.start, one.stop) for one in group]))
            ends = np.cumsum([len(one) for one in group])
            for samples, positions in zip(group, np.split(found, ends[:-1]), strict=True):
                yield Request(samples, positions)
            at_once = _AT_ONCE

    def request(self, samples: range) -> Request:
        return next(self.requests([samples]))

    def read(self, request: Request) -> Answer:
        """Read a batch in this process."""
        return _answer(self[request])

    def _positions(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._order is not None:
            return self._order.positions(samples)
        return samples if self.source.count is None else samples % self.source.count


def _group(ranges: Iterator[range], least: int) -> list[range]:
    """Return the next ranges, with at least `least` samples in total."""
    group, samples = [], 0
    for one in ranges:
        group.append(one)
        samples += len(one)
        if samples >= least:
            break
    return group


class ReadAhead:
    """Iterates over batches that worker processes read in order; `close` stops the workers.

    Args:
        workers: 1 or more.
        prefetch: batches that each worker reads ahead.
        pin_memory: move the tensors into pinned memory, for asynchronous copies to a GPU.
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
            generator=torch.Generator(),  # by default, torch would draw the worker seed from the training's stream
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
                f"a worker process of the loader exited: {error}",
                where="data.workers",
                fix=f"{'set data.workers to 0' if self._workers == 1 else f'set data.workers below {self._workers}'}, or "
                "increase the job's memory; a container may need a larger /dev/shm",
            ) from error
        return _answer(answer)

    def close(self) -> None:
        self._batches = None  # torch then tells the workers to exit, and waits a few seconds for them
        kill(self._processes)


@dataclass(frozen=True)
class _Requests:
    """Passes the requests to torch's DataLoader as its sampler."""

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

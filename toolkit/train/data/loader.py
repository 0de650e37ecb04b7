"""The loader: reads the batches of a rank ahead, in an order that the seed determines, and moves them to its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import tee
from types import TracebackType
from typing import Any

import torch

from toolkit.errors import ToolkitError
from toolkit.terminal.talk import say
from toolkit.train.data.broken import SkipCount, check_share
from toolkit.train.data.loader_settings import LoaderSettings, choose_loader_settings
from toolkit.train.data.reading import Answer, BatchReader, Plan, ReadAhead, Request
from toolkit.train.data.source import Source
from toolkit.train.data.travel import each_tensor


class Loader:
    """Reads the batches of one rank. Use it in a `with` statement, or close it: it may have worker processes.

    Its only state is the number of samples that all ranks have read, which the training loop keeps. The next samples
    are therefore the same for any number of ranks, workers or prefetched batches.

    Args:
        batch: samples per step over all ranks. `micro_batch`: samples per forward pass on this rank; 0 for all of them.
        rank, size: index of this rank and number of ranks with different samples (replicas and shards of the model).
            Ranks that share the work on the same samples (tensor parallel, pipeline) have the same index.
        settings: `workers` "auto" chooses the number by a measurement at the first batch.
        device: the device to which tensors are moved; for CUDA, workers read into pinned memory.
        shuffle: False reads positions in order. A stream is never shuffled.
        broken_limit: the maximum fraction of replaced samples on this rank; None only counts them in `skips`, for
            `training_steps` to check over all ranks.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch: int,
        seed: int,
        rank: int = 0,
        size: int = 1,
        micro_batch: int = 0,
        settings: LoaderSettings | None = None,
        device: str = "cpu",
        shuffle: bool = True,
        broken_limit: float | None = 0.01,
        tell: Callable[[str], None] = say,
    ) -> None:
        self.source = source
        self.plan = Plan(batch, micro_batch, rank, size)
        self.settings = settings or LoaderSettings()
        self.device = torch.device(device)
        self._reader = BatchReader(source, seed, shuffle=shuffle)
        self._reader.packs = self.device.type != "cuda"
        self.skips = SkipCount(tell)
        self._broken_limit = broken_limit
        self._tell = tell
        self._ahead: ReadAhead | None = None
        self._coming: Iterator[Request] = iter(())  # the planned requests after `_next`
        self._next: Request | None = None

    def batches(self, first: int = 0) -> Iterator[Any]:
        """Yield the rank's micro-batches, without end, beginning with the step at global sample `first`."""
        for samples in self.plan.ranges(first):
            yield self.take_samples(samples)

    def take_samples(self, samples: range) -> Any:
        """Return the batch of these global samples, as `training_steps` requests it.

        Consecutive batches are prefetched. After a jump, such as a resume, the workers restart; a micro-batch with
        which no step begins is read immediately.
        """
        if self._next is None or samples != self._next.samples:
            self._begin_at(samples)
        try:
            answer = self._read(samples)
            self.skips.add(len(samples), answer.skips)
            if answer.skips and self._broken_limit is not None:
                check_share(self._broken_limit, self.skips.read, self.skips.skipped, lambda: self.skips.last)
        except ToolkitError:
            self.close()
            raise
        return self.source.finished(self._moved(answer.batch))

    def close(self) -> None:
        """Stop the worker processes; the next batch starts new ones."""
        ahead, self._ahead, self._next = self._ahead, None, None
        if ahead is not None:
            ahead.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, samples: range) -> Answer:
        if self._next is None or samples != self._next.samples:
            return self._reader.read(self._reader.request(samples))
        request, self._next = self._next, next(self._coming)
        return next(self._ahead) if self._ahead is not None else self._reader.read(request)

    def _begin_at(self, samples: range) -> None:
        """Restart prefetching at the step that begins with these samples, if there is one."""
        first = self.plan.first_of(samples)
        if first is None:
            return
        if self.settings.workers == "auto":
            # Every rank measures, but only rank 0 logs its result.
            tell = self._tell if self.plan.rank == 0 else lambda said: None
            self.settings = choose_loader_settings(
                self._reader, self.plan, first=first, prefetch=self.settings.prefetch, tell=tell
            )
        workers = self._useful_workers(self.settings.workers)
        self.close()
        requests = self._reader.requests(self.plan.ranges(first))
        if workers:
            given, requests = tee(requests)
            pin = self.device.type == "cuda"
            self._ahead = ReadAhead(
                self._reader, given, workers=workers, prefetch=self.settings.prefetch, pin_memory=pin
            )
        self._coming = requests
        self._next = next(requests)

    def _moved(self, batch: Any) -> Any:
        """Return the batch with its tensors on the device; copies from pinned memory are asynchronous."""
        if self.device.type == "cpu":
            return batch
        return each_tensor(batch, lambda tensor: tensor.to(self.device, non_blocking=True))

    def _useful_workers(self, workers: int | str) -> int:
        assert isinstance(workers, int)
        most = self.source.most_workers
        if most is None or workers <= most:
            return workers
        self._tell(f"this source supports at most {most} of the {workers} requested workers")
        return most

"""The loader: a rank's batches, in the order of seed and global sample index, read ahead and brought to its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import ToolkitError
from toolkit.train.data.broken import SkipCount, tell_stderr
from toolkit.train.data.loader_settings import LoaderSettings, choose_loader_settings
from toolkit.train.data.reading import Answer, BatchReader, Plan, ReadAhead
from toolkit.train.data.source import Source


class Loader:
    """Batches of a source for one rank. Use it in a `with`, or close it: it may have worker processes.

    The only state is the number of samples that all ranks have read, which the training keeps: from there on the same
    samples follow, whatever the number of ranks, workers or prefetched batches.

    Args:
        batch: samples of one step over all ranks; `micro_batch` of one forward pass on this rank, 0 for its share.
        rank, size: this rank among those that read different samples: of a mesh, those that hold copies or shards of the
            model, not those that share the work on one sample.
        settings: workers "auto" measures when the first batch is asked for.
        device: where tensors go; for CUDA, what workers read is brought into pinned memory.
        shuffle: False reads positions as they come. A stream is never shuffled.
        broken_limit: the largest share of the samples read that may be replaced.
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
        broken_limit: float = 0.01,
        tell: Callable[[str], None] = tell_stderr,
    ) -> None:
        self.source = source
        self.plan = Plan(batch, micro_batch, rank, size)
        self.settings = settings or LoaderSettings()
        self.device = torch.device(device)
        self._reader = BatchReader(source, seed, shuffle=shuffle)
        self._skips = SkipCount(broken_limit, tell)
        self._tell = tell
        self._ahead: ReadAhead | None = None
        self._coming: Iterator[range] = iter(())  # what workers read, from the next batch on
        self._next: range | None = None

    def batches(self, first: int = 0) -> Iterator[Any]:
        """The rank's micro-batches, without end, of the steps from global sample `first` on."""
        for samples in self.plan.ranges(first):
            yield self.take_samples(samples)

    def take_samples(self, samples: range) -> Any:
        """The batch of these global samples, as `training_steps` asks for it.

        What comes next in the plan is at hand already; workers begin anew where it does not, as after a resume, and
        what is no step's first micro-batch is read on the spot.
        """
        if samples != self._next:
            self._begin_at(samples)
        try:
            answer = self._reader.read(samples) if samples != self._next else self._read_ahead()
            self._skips.add(len(samples), answer.skips)
        except ToolkitError:
            self.close()
            raise
        return _moved(answer.batch, self.device)

    def close(self) -> None:
        """End the worker processes; the next batch starts new ones."""
        ahead, self._ahead, self._next = self._ahead, None, None
        if ahead is not None:
            ahead.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_ahead(self) -> Answer:
        assert self._ahead is not None
        self._next = next(self._coming)
        return next(self._ahead)

    def _begin_at(self, samples: range) -> None:
        """Start workers at the step that begins with these samples, if one does and there are to be workers."""
        first = self.plan.first_of(samples)
        if first is None:
            return
        if self.settings.workers == "auto":
            self.settings = choose_loader_settings(
                self._reader, self.plan, first=first, prefetch=self.settings.prefetch, tell=self._tell
            )
        workers = self._useful_workers(self.settings.workers)
        if workers == 0:
            return
        self.close()
        self._ahead = ReadAhead(
            self._reader,
            self.plan.ranges(first),
            workers=workers,
            prefetch=self.settings.prefetch,
            pin_memory=self.device.type == "cuda",
        )
        self._coming = self.plan.ranges(first)
        self._next = next(self._coming)

    def _useful_workers(self, workers: int | str) -> int:
        assert isinstance(workers, int)
        most = self.source.most_workers
        if most is None or workers <= most:
            return workers
        self._tell(f"{workers} workers are asked for, and this source is read by {most}")
        return most


def _moved(batch: Any, device: torch.device) -> Any:
    """The same with its tensors on the device; copies from pinned memory do not wait."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(one, device) for one in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(one, device) for one in batch)
    if isinstance(batch, dict):
        return {name: _moved(one, device) for name, one in batch.items()}
    return batch

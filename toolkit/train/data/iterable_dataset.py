"""Samples from a torch IterableDataset: a stream from which each rank selects its samples by position."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from toolkit.errors import ToolkitError
from toolkit.terminal.talk import say
from toolkit.train.data.broken import Broken, BrokenRecordError, RecordSource, broken_by
from toolkit.train.data.source import Collate
from toolkit.train.data.stacking import stack


class IterableSource(RecordSource):
    """Sample `i` is the `i`-th item of the dataset, over all epochs.

    Every rank reads the whole stream and drops the samples of the other ranks; a resume drops those already read. No
    sample is repeated or skipped, for any number of ranks, if the dataset yields the same samples every time and does
    not split them among ranks itself. If the dataset has `set_epoch`, it is called with the epoch; all epochs must have
    the same length. An iterator cannot continue after an exception, so if `broken` is "skip", it must yield a
    `BrokenRecordError` in place of a broken sample.
    """

    count = None
    most_workers = 1  # a second worker would read the same stream again

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        collate: Collate = stack,
        broken: Broken = "fail",
        tell: Callable[[str], None] = say,
    ) -> None:
        super().__init__(collate, broken)
        self.dataset = dataset
        self._tell = tell
        self._iterator: Iterator[Any] | None = None
        self._process = os.getpid()
        self._next = 0  # position of the iterator's next sample
        self._epoch = 0
        self._epoch_began = 0  # position of the epoch's first sample
        self._length: int | None = None  # samples per epoch; known after the first epoch
        self._ahead: dict[int, Any] = {}  # samples already read as replacements, which a later batch also needs

    def __getstate__(self) -> dict[str, Any]:
        # Generators and open files cannot be pickled, so another process creates its own iterator.
        return {**self.__dict__, "_iterator": None, "_ahead": {}}

    def take(self, positions: NDArray[np.int64]) -> Any:
        """Return the batch of the samples at these ascending positions."""
        if self._process != os.getpid():
            # After a fork, open files of the iterator share their offset with the parent process.
            self._iterator, self._process = None, os.getpid()
        samples = []
        for position in positions.tolist():
            for passed in [number for number in self._ahead if number < position]:
                del self._ahead[passed]
            samples.append(self.read_or_replace(position))
        return self.batch_of(samples)

    def read(self, position: int) -> Any:
        item = self._item(position)
        if isinstance(item, BrokenRecordError):
            raise item
        return item

    def _item(self, sample: int) -> Any:
        if sample not in self._ahead:
            if self._iterator is None or sample < self._next:
                self._go_to(sample)
            while self._next < sample:
                self._pull()
            self._ahead[sample] = self._pull()
        return self._ahead[sample]

    def _go_to(self, sample: int) -> None:
        """Restart at the epoch of the sample (the first if the length is unknown), and drop the samples before it."""
        self._ahead.clear()
        self._begin_epoch(sample // self._length if self._length else 0)
        dropped, began = sample - self._next, time.monotonic()
        while self._next < sample:
            self._pull()
        if dropped:
            seconds = time.monotonic() - began
            self._tell(
                f"read and dropped {dropped:,} samples of the stream to reach sample {sample:,} ({seconds:.1f} s)"
            )

    def _begin_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._epoch, self._iterator = epoch, iter(self.dataset)
        self._next = self._epoch_began = epoch * (self._length or 0)

    def _pull(self) -> Any:
        """Return the next sample of the stream."""
        name = type(self.dataset).__name__
        assert self._iterator is not None
        try:
            item = next(self._iterator)
        except StopIteration:
            self._end_epoch(name)
            return self._pull()
        except Exception as error:  # user code may raise any exception
            self._iterator = None
            raise ToolkitError(
                f"the stream failed: {broken_by(error, '').message}",
                where=f"sample {self._next} of {name}",
                fix='yield a BrokenRecordError instead of the exception; data.broken = "skip" then skips the sample',
            ) from error
        self._next += 1
        return item

    def _end_epoch(self, name: str) -> None:
        length = self._next - self._epoch_began
        if length == 0:
            raise ToolkitError(
                "the stream is empty", where=f"epoch {self._epoch} of {name}", fix="use a dataset that has samples"
            )
        if self._length not in (None, length):
            raise ToolkitError(
                f"expected {self._length:,} samples as in the previous epoch, got {length:,}",
                where=f"epoch {self._epoch} of {name}",
                fix="yield the same number of samples in every epoch, which a resume requires",
            )
        self._length = length
        self._begin_epoch(self._epoch + 1)

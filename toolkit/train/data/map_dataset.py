"""Any map-style dataset of torch: one that has a length and gives a sample for an index."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from toolkit.errors import ToolkitError
from toolkit.train.data.broken import Broken, BrokenRecordError, RecordSource, broken_by
from toolkit.train.data.source import Collate
from toolkit.train.data.stacking import stack


class MapSource(RecordSource):
    """Samples of a dataset with `__len__` and `__getitem__`; its `__getitems__` is used where it has one.

    Args:
        collate: makes a batch of a list of samples; by default what torch's own makes.
        broken: what an exception of the dataset leads to.
    """

    def __init__(self, dataset: Dataset[Any], *, collate: Collate = stack, broken: Broken = "fail") -> None:
        super().__init__(collate, broken)
        name = type(dataset).__name__
        if not hasattr(dataset, "__len__"):
            raise ToolkitError(
                "the dataset has no length",
                where=name,
                fix="give it __len__, or read it as a stream with IterableSource",
            )
        self.dataset = dataset
        self._count = len(dataset)
        if self._count == 0:
            raise ToolkitError("the dataset is empty", where=name, fix="name data that has samples")

    @property
    def count(self) -> int:
        return self._count

    def read(self, position: int) -> Any:
        try:
            return self.dataset[position]
        except BrokenRecordError:
            raise  # the dataset knows the record's file better than we do
        except Exception as error:  # a user's code may raise anything; the record is named
            raise broken_by(error, f"sample {position} of {type(self.dataset).__name__}") from error

    def read_all(self, positions: NDArray[np.int64]) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        try:
            if together is None:
                return [self.dataset[position] for position in positions.tolist()]
            samples: list[Any] = together(positions.tolist())
        except Exception as error:  # as above; which sample it was comes out one by one
            raise broken_by(error, type(self.dataset).__name__) from error
        return samples

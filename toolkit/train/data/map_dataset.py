"""Samples from a map-style torch dataset, which has a length and a sample for each index."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from toolkit.errors import ToolkitError
from toolkit.train.data.broken import Broken, BrokenRecordError, RecordSource, broken_by
from toolkit.train.data.source import Collate
from toolkit.train.data.stacking import stack


class MapSource(RecordSource):
    """Samples of a dataset with `__len__` and `__getitem__`; `__getitems__` is used if it exists.

    Args:
        collate: creates a batch from a list of samples; torch's default collate by default.
        broken: the action if the dataset raises an exception.
    """

    def __init__(self, dataset: Dataset[Any], *, collate: Collate = stack, broken: Broken = "fail") -> None:
        super().__init__(collate, broken)
        name = type(dataset).__name__
        if not hasattr(dataset, "__len__"):
            raise ToolkitError(
                "the dataset has no length", where=name, fix="add __len__, or read the dataset with IterableSource"
            )
        self.dataset = dataset
        self._count = len(dataset)
        if self._count == 0:
            raise ToolkitError("the dataset is empty", where=name, fix="use a dataset that has samples")

    @property
    def count(self) -> int:
        return self._count

    def read(self, position: int) -> Any:
        try:
            return self.dataset[position]
        except BrokenRecordError:
            raise  # the error already names the file of the record
        except Exception as error:  # user code may raise any exception
            raise broken_by(error, f"sample {position} of {type(self.dataset).__name__}") from error

    def read_all(self, positions: NDArray[np.int64]) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        try:
            if together is None:
                return [self.dataset[position] for position in positions.tolist()]
            samples: list[Any] = together(positions.tolist())
        except Exception as error:  # `take` then reads the samples one by one and finds the broken one
            raise broken_by(error, type(self.dataset).__name__) from error
        return samples

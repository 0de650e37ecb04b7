"""Any map-style dataset of torch: one with a length and a sample for each index."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from toolkit.errors import ToolkitError
from toolkit.train.data.broken import Broken, BrokenRecordError, RecordSource, broken_by
from toolkit.train.data.source import Collate
from toolkit.train.data.stacking import stack


class MapSource(RecordSource):
    """Samples of a dataset with `__len__` and `__getitem__`, or its `__getitems__` if it has one.

    Args:
        collate: creates a batch from a list of samples; torch's default collate by default.
        broken: the action on an exception of the dataset.
    """

    def __init__(self, dataset: Dataset[Any], *, collate: Collate = stack, broken: Broken = "fail") -> None:
        super().__init__(collate, broken)
        name = type(dataset).__name__
        if not hasattr(dataset, "__len__"):
            raise ToolkitError(
                "the dataset has no length", where=name, fix="add __len__, or read it as a stream with IterableSource"
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
            raise  # the dataset itself names the record's file
        except Exception as error:  # a user's code may raise anything
            raise broken_by(error, f"sample {position} of {type(self.dataset).__name__}") from error

    def read_all(self, positions: NDArray[np.int64]) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        try:
            if together is None:
                return [self.dataset[position] for position in positions.tolist()]
            samples: list[Any] = together(positions.tolist())
        except Exception as error:  # reading one by one then finds the sample
            raise broken_by(error, type(self.dataset).__name__) from error
        return samples

"""Samples from datasets of an HDF5 file; the first dimension of a dataset is the sample index."""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.config.table import nearest
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.train.data.broken import Broken, BrokenRecordError, RecordSource
from toolkit.train.data.stacking import stack

_KINDS = "biufc"  # numpy dtype kinds that torch supports


class HDF5Source(RecordSource):
    """Sample `i` is `(first[i], second[i], ...)` of the named datasets, or `first[i]` if only one is named.

    A batch is read in slices in file order, so that HDF5 reads each chunk once, and returned in the requested order.
    """

    def __init__(self, path: Path | str, names: Sequence[str], *, broken: Broken = "fail") -> None:
        super().__init__(stack, broken)
        self.path = Path(path)
        self.names = [names] if isinstance(names, str) else list(names)
        self._file: h5py.File | None = None
        self._process = 0
        self._count = self._check()
        self.close()  # the process that reads samples reopens it: an HDF5 handle must not cross a fork

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    @property
    def count(self) -> int:
        return self._count

    def take(self, positions: NDArray[np.int64]) -> Any:
        try:
            arrays = [self._rows(dataset, positions) for dataset in self._datasets()]
        except OSError:
            # An unreadable block fails its whole slice. Reading one by one finds the broken samples.
            return super().take(positions)
        tensors = tuple(torch.from_numpy(array) for array in arrays)
        return tensors if len(tensors) > 1 else tensors[0]

    def read(self, position: int) -> Any:
        tensors = []
        for dataset in self._datasets():
            try:
                tensors.append(torch.from_numpy(np.asarray(dataset[position])))
            except OSError as error:
                raise BrokenRecordError(
                    f"cannot read this sample: {error}",
                    where=f"{self.path}:{dataset.name}[{position}]",
                    fix='restore the file, or set data.broken = "skip"',
                ) from error
        return tuple(tensors) if len(tensors) > 1 else tensors[0]

    def close(self) -> None:
        """Close the file; the next `take` opens it again."""
        if self._file is not None and self._process == os.getpid():
            self._file.close()
        self._file = None

    def _rows(self, dataset: h5py.Dataset, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows at `positions`, in that order."""
        in_order, place = np.unique(positions, return_inverse=True)
        rows = np.empty((len(in_order), *dataset.shape[1:]), dataset.dtype)
        for first, last in _slices(in_order, dataset.chunks[0] if dataset.chunks else 1):
            begin, end = int(in_order[first]), int(in_order[last - 1]) + 1
            if end - begin == last - first:
                dataset.read_direct(rows, np.s_[begin:end], np.s_[first:last])
            else:
                rows[first:last] = dataset[begin:end][in_order[first:last] - begin]
        return rows[place]

    def _datasets(self) -> list[h5py.Dataset]:
        if self._file is None or self._process != os.getpid():
            self._file, self._process = self._opened(), os.getpid()
        return [self._file[name] for name in self.names]

    def _opened(self) -> h5py.File:
        try:
            # No process writes the file during a run, and some parallel file systems do not support locks.
            return h5py.File(self.path, "r", locking=False)
        except FileNotFoundError as error:
            raise NotFoundError("file not found", where=str(self.path), fix="pass an existing HDF5 file") from error
        except OSError as error:
            raise ToolkitError(
                f"cannot open the file: {error}", where=str(self.path), fix="pass a complete HDF5 file"
            ) from error

    def _check(self) -> int:
        file = self._file = self._opened()
        self._process = os.getpid()
        counts: dict[str, int] = {}
        for name in self.names:
            dataset = file.get(name)
            if not isinstance(dataset, h5py.Dataset):
                near = nearest(name, file)
                fix = f"pass {near[0]!r}" if near else f"the file has {', '.join(map(repr, file))}"
                raise NotFoundError(f"the file has no dataset {name!r}", where=str(self.path), fix=fix)
            if dataset.dtype.kind not in _KINDS or not dataset.shape:
                what = f"{dataset.dtype} of shape {dataset.shape}"
                raise ToolkitError(
                    f"expected an array of numbers, got {what}",
                    where=f"{self.path}:{name}",
                    fix="pass a dataset of numbers whose first dimension is the sample index",
                )
            counts[name] = len(dataset)
        if len(set(counts.values())) != 1 or not all(counts.values()):
            raise ToolkitError(
                "expected datasets with the same number of samples, 1 or more, got "
                + ", ".join(f"{count:,} ({name})" for name, count in counts.items()),
                where=str(self.path),
                fix="pass non-empty datasets of the same length",
            )
        return next(iter(counts.values()))


def _slices(in_order: NDArray[np.int64], chunk: int) -> list[tuple[int, int]]:
    """Split sorted positions into slices [first, last) between rows that are neither adjacent nor in the same chunk.

    HDF5 always reads a whole chunk, so more rows of the same chunk cost nothing.
    """
    apart = (np.diff(in_order) > 1) & (np.diff(in_order // chunk) > 0)
    cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(in_order)]
    return list(pairwise(cuts))

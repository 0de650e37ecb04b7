"""Datasets of an HDF5 file, whose first dimension counts the samples."""

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

_KINDS = "biufc"  # of numpy: what becomes a tensor


class HDF5Source(RecordSource):
    """Sample `i` is `(first[i], second[i], ...)` of the named datasets, or `first[i]` if one is named.

    A batch is read in slices in file order, each chunk once, and returned in the requested order.
    """

    def __init__(self, path: Path | str, names: Sequence[str], *, broken: Broken = "fail") -> None:
        super().__init__(stack, broken)
        self.path = Path(path)
        self.names = [names] if isinstance(names, str) else list(names)
        self._file: h5py.File | None = None
        self._process = 0
        self._count = self._check()
        self.close()  # opened by the process that reads samples: an HDF5 handle must not cross a fork

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    @property
    def count(self) -> int:
        return self._count

    def take(self, positions: NDArray[np.int64]) -> Any:
        try:
            arrays = [self._rows(dataset, positions) for dataset in self._datasets()]
        except OSError:
            # One unreadable block breaks its whole slice: reading one by one finds its samples.
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
                    f"cannot be read: {error}",
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
            # No process writes while a run reads, and some parallel file systems reject locks.
            return h5py.File(self.path, "r", locking=False)
        except FileNotFoundError as error:
            raise NotFoundError("file not found", where=str(self.path), fix="name an HDF5 file") from error
        except OSError as error:
            raise ToolkitError(
                f"cannot open it: {error}", where=str(self.path), fix="name a whole HDF5 file"
            ) from error

    def _check(self) -> int:
        file = self._file = self._opened()
        self._process = os.getpid()
        counts: dict[str, int] = {}
        for name in self.names:
            dataset = file.get(name)
            if not isinstance(dataset, h5py.Dataset):
                near = nearest(name, file)
                fix = f"write {near[0]!r}" if near else f"the file has {', '.join(map(repr, file))}"
                raise NotFoundError(f"no dataset {name!r}", where=str(self.path), fix=fix)
            if dataset.dtype.kind not in _KINDS or not dataset.shape:
                what = f"{dataset.dtype} of shape {dataset.shape}"
                raise ToolkitError(
                    f"holds {what}, which torch does not support",
                    where=f"{self.path}:{name}",
                    fix="name a dataset of numbers whose first dimension counts the samples",
                )
            counts[name] = len(dataset)
        if len(set(counts.values())) != 1 or not all(counts.values()):
            raise ToolkitError(
                f"the datasets have {', '.join(f'{count:,} ({name})' for name, count in counts.items())} samples",
                where=str(self.path),
                fix="name datasets of one length, of 1 or more",
            )
        return next(iter(counts.values()))


def _slices(in_order: NDArray[np.int64], chunk: int) -> list[tuple[int, int]]:
    """Cut rising positions into slices [first, last), between rows that are neither adjacent nor in one chunk.

    HDF5 reads a chunk as a whole, so further rows of a chunk cost nothing.
    """
    apart = (np.diff(in_order) > 1) & (np.diff(in_order // chunk) > 0)
    cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(in_order)]
    return list(pairwise(cuts))

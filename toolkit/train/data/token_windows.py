"""Samples from memory-mapped token files: windows of tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from toolkit.errors import ToolkitError
from toolkit.train.data.token_file import map_tokens, read_header


class TokenSource:
    """Samples of `context` tokens, each with the next token as target. No window spans two files.

    Args:
        files: token files from `toolkit data pack`, or raw files, for which `dtype` must be "uint16" or "uint32".
    """

    most_workers: int | None = None

    def __init__(self, files: Sequence[Path | str], context: int, *, dtype: str | None = None) -> None:
        if context < 1:
            raise ToolkitError(f"expected 1 or more tokens, got {context}", where="context", fix="choose 1 or more")
        self.files = [Path(file) for file in files]
        self.context = context
        self.dtype = dtype
        self._windows: list[NDArray[Any]] | None = None
        counts = [len(windows) for windows in self._open()]
        self._ends = np.cumsum(counts)  # sample number after the last sample of each file
        if not counts or self._ends[-1] == 0:
            raise ToolkitError(
                f"none of {len(self.files)} files has {context + 1} tokens, which a window and its last target require",
                where=", ".join(map(str, self.files[:3])),
                fix="pass files with more tokens, or reduce the context",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_windows": None}  # pickling a memory map would copy its bytes

    @property
    def count(self) -> int:
        return int(self._ends[-1])

    @property
    def digest(self) -> str:
        """Return the digests in the file headers ("raw" without one); equal on all ranks that read the same files."""
        headers = [read_header(path) for path in self.files]
        return "+".join(header.digest.hex() if header else "raw" for header in headers)

    def take(self, positions: NDArray[np.int64]) -> Tensor:
        """Return the windows as stored, of shape (len(positions), context + 1) and type uint16 or uint32."""
        files = self._open()
        numbers = np.searchsorted(self._ends, positions, side="right")
        present = np.unique(numbers).tolist()
        first = np.concatenate([[0], self._ends])
        if len(present) == 1:
            return torch.from_numpy(files[present[0]][positions - first[present[0]]])
        kinds = [files[number].dtype for number in present]
        rows = np.empty((len(positions), self.context + 1), max(kinds, key=lambda kind: kind.itemsize))
        for number in present:
            chosen = np.flatnonzero(numbers == number)
            rows[chosen] = files[number][positions[chosen] - first[number]]
        return torch.from_numpy(rows)

    def finished(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both int64 of shape (samples, context); the copy to a GPU uses the short type."""
        rows = batch.long()
        return rows[:, :-1], rows[:, 1:]

    def drain_skips(self) -> list[str]:
        return []

    def _open(self) -> list[NDArray[Any]]:
        if self._windows is None:
            self._windows = [_windows(map_tokens(path, self.dtype), self.context) for path in self.files]
        return self._windows


def _windows(tokens: NDArray[Any], context: int) -> NDArray[Any]:
    """Return all windows as overlapping rows of one array, so that numpy copies a window as a whole."""
    count = max(0, (len(tokens) - 1) // context)
    width = tokens.itemsize
    return as_strided(tokens, (count, context + 1), (context * width, width), writeable=False)

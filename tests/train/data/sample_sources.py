"""Sources of 29 samples, each of which says its own number: written into files where a source reads files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset, IterableDataset

from toolkit.train.data import HDF5Source, IterableSource, JsonLinesSource, MapSource, TokenSource

COUNT = 29
KINDS = ("map", "iterable", "tokens", "hdf5", "json_lines")


class Numbers(Dataset):
    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, position: int) -> int:
        return position


class Stream(IterableDataset):
    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def source_of(kind: str, folder: Path) -> Any:
    if kind == "map":
        return MapSource(Numbers())
    if kind == "iterable":
        return IterableSource(Stream(), tell=lambda text: None)
    if kind == "hdf5":
        path = folder / "samples.h5"
        if not path.exists():
            with h5py.File(path, "w") as file:
                file.create_dataset("number", data=np.arange(COUNT), chunks=(4,))
        return HDF5Source(path, "number")
    if kind == "json_lines":
        files = [folder / "one.jsonl", folder / "two.jsonl"]
        for path, numbers in zip(files, (range(11), range(11, COUNT)), strict=True):
            path.write_text("".join(json.dumps({"number": number}) + "\n\n" for number in numbers))
        return JsonLinesSource(files, convert=lambda record: record["number"])
    # The first token of a window is its sample's number; the last file has a token more than whole windows.
    files = [folder / "one.bin", folder / "two.bin"]
    for path, numbers in zip(files, (range(11), range(11, COUNT)), strict=True):
        tokens = [token for number in numbers for token in (number, 1000, 2000)]
        np.array([*tokens, 3000], np.uint16).tofile(path)
    return TokenSource(files, 3, dtype="uint16")


def numbers_in(batch: Any) -> list[int]:
    """Which samples a batch holds."""
    if isinstance(batch, tuple):  # of tokens: inputs and targets
        assert batch[0][:, 1:].tolist() == batch[1][:, :-1].tolist()
        return batch[0][:, 0].tolist()
    return batch.tolist()

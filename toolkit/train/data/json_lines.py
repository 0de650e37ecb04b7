"""Samples from JSON Lines files, which have one record per line; an index contains the offset of each line."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.errors import ToolkitError
from toolkit.rundir.files import json_reason
from toolkit.train.data.broken import Broken, BrokenRecordError, RecordSource, broken_by
from toolkit.train.data.line_index import LineIndex, line_index
from toolkit.train.data.source import Collate
from toolkit.train.data.stacking import stack


class JsonLinesSource(RecordSource):
    """Sample `i` is `convert(record)` for the parsed `i`-th non-empty line of all files.

    Args:
        convert: creates a sample from a record; an exception marks the record as broken.
        collate: creates a batch from a list of samples; torch's default collate by default.
        index_folder: the folder for line indexes; by default each file's own folder.
    """

    def __init__(
        self,
        files: Sequence[Path | str],
        *,
        convert: Callable[[Any], Any] | None = None,
        collate: Collate = stack,
        broken: Broken = "fail",
        index_folder: Path | None = None,
    ) -> None:
        super().__init__(collate, broken)
        self.files = [Path(file) for file in files]
        self.convert = convert
        self.index_folder = index_folder
        self._indexes: list[LineIndex] | None = None
        self._descriptors: dict[int, int] = {}  # open file descriptors by file number
        self._ends = np.cumsum([len(index.starts) for index in self._opened()])
        if not self.files or self._ends[-1] == 0:
            raise ToolkitError(
                "expected 1 or more records, got none",
                where=", ".join(map(str, self.files[:3])),
                fix="pass files with non-empty lines",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_indexes": None, "_descriptors": {}}

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_descriptors", {}).values():
            os.close(descriptor)

    @property
    def count(self) -> int:
        return int(self._ends[-1])

    def read(self, position: int) -> Any:
        number = int(np.searchsorted(self._ends, position, side="right"))
        record = position - (int(self._ends[number - 1]) if number else 0)
        index = self._opened()[number]
        begin, end = index.span(record)
        # pread, because forked processes share the file offset.
        line = os.pread(self._descriptor(number), end - begin, begin)
        where = f"{self.files[number]}:{index.line(record)}"
        try:
            value = json.loads(line.rstrip())  # otherwise json would report an error at the line end for the next line
        except (ValueError, RecursionError) as error:
            raise BrokenRecordError(
                f"not valid JSON: {json_reason(error)}",
                where=where,
                fix='fix or remove the line, or set data.broken = "skip"',
            ) from error
        if self.convert is None:
            return value
        try:
            return self.convert(value)
        except Exception as error:  # user code may raise any exception
            raise broken_by(error, where) from error

    def _opened(self) -> list[LineIndex]:
        if self._indexes is None:
            self._indexes = [line_index(path, self.index_folder) for path in self.files]
        return self._indexes

    def _descriptor(self, number: int) -> int:
        if number not in self._descriptors:
            self._descriptors[number] = os.open(self.files[number], os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[number]

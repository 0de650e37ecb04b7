"""Files of one JSON record a line, appended to by one writer. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from toolkit.errors import ToolkitError
from toolkit.rundir.files import is_unwritable


class Record(Protocol):
    """What such a file holds."""

    def to_line(self) -> str: ...


R = TypeVar("R", bound=Record)
T = TypeVar("T")


class RecordLog(Generic[R]):
    """Appends records to a file, each whole and at once. Only rank 0 may hold one.

    A disk that takes nothing loses lines and no run: that is told once, until it takes them again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a+b", buffering=0)
        self._lost = 0
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        """A writer killed in the middle of a line leaves half of it; the next line must not join it."""
        size = self._stream.seek(0, os.SEEK_END)
        tail = min(size, 65536)
        self._stream.seek(size - tail)
        torn = self._stream.read(tail).rpartition(b"\n")[2]
        self._stream.truncate(size - len(torn))

    def write(self, record: R) -> None:
        line = record.to_line().encode() + b"\n"
        before = os.fstat(self._stream.fileno()).st_size
        try:
            written = self._stream.write(line)
        except OSError as error:
            if not is_unwritable(error):
                raise
            self._lose(str(error.strerror))
            return
        if written != len(line):
            self._stream.truncate(before)
            self._lose("no room for a whole line")
        elif self._lost:
            self._tell(f"{self._lost} lines of {self.path} were lost")
            self._lost = 0

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._tell(f"{self.path} is not written: {why}")
        self._lost += 1

    def _tell(self, said: str) -> None:
        with suppress(OSError):  # the log of a rank lies on the same disk
            sys.stderr.write(f"toolkit: {said}\n")

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(path: Path, from_line: Callable[[str], T], *, what: str) -> Iterator[T]:
    """The records of a file, which may be written meanwhile: an unfinished last line is not yet read.

    Raises:
        ToolkitError: for a finished line that is no record, naming file and line.
    """
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield from_line(line)
            except (ValueError, KeyError, TypeError) as error:
                raise ToolkitError(
                    f"not a {what} record ({error})",
                    where=f"{path}:{number}",
                    fix="delete this line; nothing else of the run depends on it",
                ) from None

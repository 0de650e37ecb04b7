"""JSON Lines files to which a single writer appends. Standard library only."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from toolkit.errors import ToolkitError
from toolkit.rundir.files import is_unwritable, json_reason, mode_of_files_in
from toolkit.terminal.talk import say_beside

__all__ = ["RecordLog", "RecordTail", "last_of", "read_records", "records_from_end"]


class Record(Protocol):
    """A record that can be written as a line."""

    def to_line(self) -> str: ...


MOST_WAITING = 10_000  # lines kept while the disk is full; the oldest are dropped first
_MOST_NEW = 1 << 22  # bytes that a tail reads at once
_BLOCK = 1 << 16  # bytes that are read at once from the end of a file


class OfStep(Protocol):
    """A record of an optimizer step."""

    @property
    def step(self) -> int: ...


R = TypeVar("R", bound=Record)
S = TypeVar("S", bound=OfStep)
T = TypeVar("T")


class RecordLog(Generic[R]):
    """Appends records to a file, never a partial one. Only rank 0 may create one.

    A full disk does not end the run. The log reports it once and keeps the lines until it can write them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a+b", buffering=0)
        os.fchmod(self._stream.fileno(), mode_of_files_in(path.parent) & 0o640)  # whatever the umask is
        self._waiting: list[bytes] = []
        self._lost = 0
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        """Remove the partial line of a killed writer, so that the next line does not continue it."""
        size = self._stream.seek(0, os.SEEK_END)
        tail = min(size, 65536)
        self._stream.seek(size - tail)
        torn = self._stream.read(tail).rpartition(b"\n")[2]
        self._stream.truncate(size - len(torn))

    def write(self, record: R) -> None:
        self._waiting.append(record.to_line().encode() + b"\n")
        self._write_waiting(is_new=True)

    def retry(self) -> None:
        """Write the lines that wait for free space."""
        if self._waiting:
            self._write_waiting(is_new=False)

    def _write_waiting(self, *, is_new: bool) -> None:
        lines = b"".join(self._waiting)
        before, why = os.fstat(self._stream.fileno()).st_size, "no free space for a whole line"
        written = 0
        try:
            written = self._stream.write(lines)
        except OSError as error:
            if not is_unwritable(error):
                raise
            why = str(error.strerror)
        if written == len(lines):
            if len(self._waiting) > 1 or not is_new:
                say_beside(f"can write {self.path} again")
            self._waiting.clear()
            return
        if written:
            self._stream.truncate(before)
        if len(self._waiting) == 1 and is_new:
            say_beside(f"cannot write {self.path}, will retry: {why}")
        too_many = max(0, len(self._waiting) - MOST_WAITING)
        del self._waiting[:too_many]
        self._lost += too_many

    def close(self) -> None:
        self.retry()
        if lost := self._lost + len(self._waiting):
            say_beside(f"{lost} lines of {self.path} were lost")
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(path: Path, from_line: Callable[[str], T], *, what: str) -> Iterator[T]:
    """Yield the records of a file; an incomplete last line is skipped, because a writer may be active.

    Raises:
        ToolkitError: a complete line is not a record; the error names file and line.
    """
    with path.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield from_line(line.rstrip("\n"))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ToolkitError(
                    f"not a {what} record ({json_reason(error)})",
                    where=f"{path}:{number}",
                    fix="delete this line; nothing else of the run depends on it",
                ) from None


def read_steps(path: Path, from_line: Callable[[str], S], *, what: str) -> list[S]:
    """Return the current records of the run in step order, each step once.

    After a resume or a roll-back, steps repeat: a line with step N replaces all previous lines with step N or later.
    Raises the errors of `read_records`.
    """
    kept: list[S] = []
    for record in read_records(path, from_line, what=what):
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return kept


def last_of(path: Path, from_line: Callable[[str], T]) -> T | None:
    """Return the newest record, or None; reads the file from its end, and skips an incomplete last line."""
    return next(records_from_end(path, from_line), None)


def records_from_end(path: Path, from_line: Callable[[str], T]) -> Iterator[T]:
    """Yield the records of a file, the newest first; skips lines that are not records. Yields nothing if there is no file."""
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        return
    with stream:
        end, rest = stream.seek(0, os.SEEK_END), b""
        while end:
            begin = max(0, end - _BLOCK)
            stream.seek(begin)
            lines = (stream.read(end - begin) + rest).split(b"\n")
            rest, end = lines.pop(0) if begin else b"", begin  # the first line begins in an earlier block
            for line in reversed(lines):
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    yield from_line(line.decode())


@dataclass
class RecordTail(Generic[T]):
    """The records that a writer has added to a file since the last call.

    A damaged line is skipped: commands that read the whole file name it (`read_records`).
    """

    path: Path
    from_line: Callable[[str], T]
    offset: int = 0  # of the next line to read

    def new(self) -> list[T]:
        """Return the new records, [] if there is no file. Call again for the rest of a long file."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                lines = stream.read(_MOST_NEW).splitlines(keepends=True)
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self.offset += len(line)
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                found.append(self.from_line(line.decode()))
        return found

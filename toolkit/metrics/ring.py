"""The last steps of one rank, in a file in shared memory that other processes of the user read. Standard library only.

A ring has a header (`_HEADER`, the number of records, the names of the columns) and `CAPACITY` records of `RECORD` bytes:
the time of the end of the step, its number, the number of the record, and one 32-bit float per column.

The writer writes a record, and then increases the number of records in the header. A reader copies records, reads that
number again, and drops the records whose slots the writer may have overwritten meanwhile. So no reader sees a torn record,
and neither side waits for the other. The writer keeps a lock on the file until it exits, even by `kill -9`: a ring without
a lock is a leftover, also if its writer ran in another container.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import ToolkitError
from toolkit.metrics.windows import COLUMNS, MOST_USER_METRICS

__all__ = [
    "ABSENT", "CAPACITY", "WIDTH", "Ring", "RingReader", "Steps", "limited", "rings_of", "unused_rings",
]  # fmt: skip

CAPACITY = 4096
# The value of a column that a step did not report: the smallest 32-bit float, because NaN is a valid loss.
ABSENT = -3.4028234663852886e38
LARGEST = -ABSENT

_MAGIC = b"TKRING\0\3"
_HEADER = struct.Struct("<8s4I64s")  # magic, rank, attempt, columns, launcher, run
_COUNT = struct.Struct("<Q")
_GIVES_WAY_AT = _HEADER.size  # a byte: whether the ring of the program itself may replace this one
_RECORDS_COUNT_AT, _NAMES_COUNT_AT, _NAMES_AT, _RECORDS_AT = 128, 136, 256, 4096
_NAME_BYTES = 64
WIDTH = len(COLUMNS) + MOST_USER_METRICS  # values of a record
_RECORD = struct.Struct(f"<dqq{WIDTH}f")
RECORD, _FLOATS_AT = _RECORD.size, struct.calcsize("<dqq")
_SIZE = _RECORDS_AT + CAPACITY * RECORD
_SHARED_MEMORY = Path("/dev/shm")


def _folders() -> tuple[Path, ...]:
    """Return the folders that may contain rings: shared memory, and /tmp if that is full. TMPDIR may be on a file server."""
    return _SHARED_MEMORY, Path("/tmp")


def _name(run_id: str, attempt: int, rank: int | str) -> str:
    return f"toolkit-{os.geteuid()}-{run_id}-{attempt:03}-{rank}.ring"


class Ring:
    """The ring of this process. Only one process at a time can write the ring of a rank."""

    def __init__(
        self, path: Path, run_id: str, attempt: int, rank: int, launcher: int = 0, *, gives_way: bool = False
    ) -> None:
        """Create the file; `launcher` is the pid of the process that started the ranks of this node.

        If it `gives_way`, another process may replace it: its steps are read from the output of a program.

        Raises:
            OSError: no free space, or another process writes this ring.
        """
        self.path = path
        self.names = list(COLUMNS)
        self._records = 0
        self._file = _created(path)
        try:
            # Allocates all pages, since a write to a page that a full disk cannot provide would kill the rank.
            os.posix_fallocate(self._file, 0, _SIZE)
            self._map = mmap.mmap(self._file, _SIZE)
            # A count changes at once. `pack_into` would set its bytes to 0 first, which readers would see.
            self._counts = memoryview(self._map)[:_NAMES_AT].cast("Q")
        except OSError:
            path.unlink(missing_ok=True)
            os.close(self._file)
            raise
        for column, name in enumerate(COLUMNS):
            self._write_name(column, name)
        header = (rank, attempt, len(COLUMNS), launcher, run_id.encode()[:64])
        self._counts[_NAMES_COUNT_AT // 8] = len(COLUMNS)
        _HEADER.pack_into(self._map, 0, b"", *header)
        self._map[_GIVES_WAY_AT] = gives_way
        self._map[: len(_MAGIC)] = _MAGIC  # last: a reader ignores the file until then

    def column(self, name: str) -> int | None:
        """Return the column of a metric, a new one if there is none; None if all columns are in use."""
        if name in self.names:
            return self.names.index(name)
        if len(self.names) == WIDTH:
            return None
        self._write_name(len(self.names), name)
        self.names.append(name)
        self._counts[_NAMES_COUNT_AT // 8] = len(self.names)
        return len(self.names) - 1

    def append(self, ended_s: float, step: int, values: Sequence[float]) -> None:
        """Write the record of a step; `values` has a value for each possible column."""
        number = self._records
        at = _RECORDS_AT + number % CAPACITY * RECORD
        try:
            _RECORD.pack_into(self._map, at, ended_s, step, number, *values)
        except OverflowError:  # a value is not a 32-bit float
            _RECORD.pack_into(self._map, at, ended_s, step, number, *map(limited, values))
        self._records = number + 1
        self._counts[_RECORDS_COUNT_AT // 8] = number + 1

    def close(self) -> None:
        """Release the ring; the file remains for readers."""
        self._counts.release()
        self._map.close()
        os.close(self._file)

    def _write_name(self, column: int, name: str) -> None:
        struct.pack_into(f"<{_NAME_BYTES}s", self._map, _NAMES_AT + column * _NAME_BYTES, name.encode())

    @classmethod
    def of_rank(cls, run_id: str, attempt: int, rank: int, launcher: int = 0, *, gives_way: bool = False) -> Ring:
        """Create the ring of a rank in the first folder with free space.

        Raises:
            OSError: no folder has free space, or another process writes this ring.
        """
        problem: OSError = FileNotFoundError()
        for folder in _folders():
            try:
                return cls(folder / _name(run_id, attempt, rank), run_id, attempt, rank, launcher, gives_way=gives_way)
            except FileExistsError as error:
                if _is_own(folder / _name(run_id, attempt, rank)):
                    raise
                problem = error  # another user has taken the name
            except OSError as error:
                problem = error
        raise problem


def _created(path: Path) -> int:
    """Return the descriptor of a new, locked file, which replaces that of a process that has exited."""
    if _is_unused(path) or _gives_way(path):
        path.unlink(missing_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(file, 0o600)  # regardless of the umask
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def limited(value: float) -> float:
    """Return the nearest 32-bit float to a number that is too large for one."""
    return math.copysign(LARGEST, value) if LARGEST < abs(value) < math.inf else value


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _gives_way(path: Path) -> bool:
    """Return whether the process of this user that writes a ring reads its steps from the output of the program."""
    if not _is_own(path) or path.is_symlink():
        return False
    with path.open("rb") as file:
        return os.pread(file.fileno(), 1, _GIVES_WAY_AT) == b"\1"


def _is_unused(path: Path) -> bool:
    """Return whether a file is a ring of this user that no running process writes."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def unused_rings(*folders: Path) -> set[Path]:
    """Return the rings of this user, of any run, whose writers have exited."""
    pattern = f"toolkit-{os.geteuid()}-*.ring"
    return {path for folder in folders or _folders() for path in folder.glob(pattern) if _is_unused(path)}


def rings_of(run_id: str, attempt: int, rank: int | None = None) -> list[Path]:
    """Return the rings on this node of an attempt, or of one of its ranks."""
    pattern = _name(run_id, attempt, "*" if rank is None else rank)
    return sorted(path for folder in _folders() for path in folder.glob(pattern))


def _field(data: bytes, kind: Literal["d", "q", "f"], position: int) -> list[Any]:
    """Return one field of all records; `position` counts fields of the size of `kind`."""
    return memoryview(data).cast(kind)[position :: RECORD // struct.calcsize(kind)].tolist()


@dataclass(frozen=True)
class Steps:
    """Consecutive records of a ring; `names` are those of its columns."""

    data: bytes
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.data) // RECORD

    def ended_s(self) -> list[float]:
        """Return when each step ended, in seconds since the epoch."""
        return _field(self.data, "d", 0)

    def numbers(self) -> list[int]:
        """Return the number of each step."""
        return _field(self.data, "q", 1)

    def values(self, name: str) -> list[float]:
        """Return the values of a metric, without the steps that did not report it."""
        if name not in self.names:
            return []
        column = _field(self.data, "f", _FLOATS_AT // 4 + self.names.index(name))
        return [value for value in column if value != ABSENT] if ABSENT in column else column

    def newest(self, name: str) -> tuple[int, float] | None:
        """Return the step and value of the last step that reported a metric; None if no step did."""
        column = _field(self.data, "f", _FLOATS_AT // 4 + self.names.index(name))
        at = next((at for at in range(len(column) - 1, -1, -1) if column[at] != ABSENT), None)
        return None if at is None else (self.numbers()[at], column[at])

    def first_not_finite(self, name: str) -> int | None:
        """Return the number of the first step whose value of a metric is not finite; None if there is none."""
        column = _field(self.data, "f", _FLOATS_AT // 4 + self.names.index(name))
        return next(
            (step for step, value in zip(self.numbers(), column, strict=True) if not math.isfinite(value)), None
        )

    def cut(self, first: int, end: int) -> Steps:
        """Return some of the steps."""
        return Steps(self.data[first * RECORD : end * RECORD], self.names)


class RingReader:
    """Reads the ring of a rank while the rank writes it. It does not map the file, so a truncated file is an error only."""

    def __init__(self, path: Path) -> None:
        """Open the file and check its header.

        Raises:
            ToolkitError: not the ring of a rank of this user.
            FileNotFoundError: the ring has been removed, or its writer is creating it.
        """
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._refused(str(error.strerror)) from None
        try:
            facts = os.fstat(self._file)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                raise self._refused("not a file of this user")
            if facts.st_size and facts.st_size != _SIZE:
                raise self._refused(f"expected {_SIZE} bytes, got {facts.st_size}")
            if not facts.st_size or not any(self._read(0, len(_MAGIC))):
                raise FileNotFoundError(self.path)
            magic, self.rank, self.attempt, columns, self.launcher, run = _HEADER.unpack(self._read(0, _HEADER.size))
            if magic != _MAGIC or columns != len(COLUMNS):
                raise self._refused("not a ring of this version of toolkit")
            self.run_id = run.rstrip(b"\0").decode(errors="replace")
        except (ToolkitError, FileNotFoundError):
            self.close()
            raise
        self._next = 0
        self.names: list[str] = list(COLUMNS)

    def new(self) -> Steps:
        """Return the steps since the last call that are still in the ring.

        Raises:
            ToolkitError: the file is damaged.
        """
        head = self._count(_RECORDS_COUNT_AT)
        if not self._next <= head:
            raise self._refused(f"expected at least {self._next} records, got {head}")
        self._read_names()
        begin = max(self._next, head - CAPACITY + 1)
        data = self._copy(begin, head)
        # The writer may have overwritten the oldest records meanwhile, and be writing one more.
        kept = max(begin, self._count(_RECORDS_COUNT_AT) - CAPACITY + 1)
        data = data[(kept - begin) * RECORD :]
        if _field(data, "q", 2) != list(range(kept, max(kept, head))):
            raise self._refused("the numbers of its records are not consecutive")
        self._next = max(head, kept)
        return Steps(data, self.names)

    def close(self) -> None:
        os.close(self._file)

    def _copy(self, begin: int, end: int) -> bytes:
        if begin >= end:
            return b""
        first, last = begin % CAPACITY, (end - 1) % CAPACITY
        if first <= last:
            return self._read(_RECORDS_AT + first * RECORD, (end - begin) * RECORD)
        tail = self._read(_RECORDS_AT + first * RECORD, (CAPACITY - first) * RECORD)
        return tail + self._read(_RECORDS_AT, (last + 1) * RECORD)

    def _count(self, at: int) -> int:
        return int(_COUNT.unpack(self._read(at, _COUNT.size))[0])

    def _read_names(self) -> None:
        """Read the names of new columns. A new list, as steps that were returned earlier have the old one."""
        count = self._count(_NAMES_COUNT_AT)
        if count == len(self.names):
            return
        if not len(COLUMNS) <= count <= WIDTH:
            raise self._refused(f"expected {len(COLUMNS)} to {WIDTH} columns, got {count}")
        text = self._read(_NAMES_AT, count * _NAME_BYTES)
        names = (text[at : at + _NAME_BYTES].rstrip(b"\0") for at in range(0, len(text), _NAME_BYTES))
        self.names = [name.decode(errors="replace") for name in names]

    def _read(self, at: int, size: int) -> bytes:
        data = os.pread(self._file, size, at)
        if len(data) != size:
            raise self._refused("the file was truncated")
        return data

    def _refused(self, reason: str) -> ToolkitError:
        return ToolkitError(
            f"cannot read the steps of a rank: {reason}",
            where=str(self.path),
            fix="delete the file if its run has ended",
        )

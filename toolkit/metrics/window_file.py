"""The windows of the ranks of one node, in a file of bounded size. Standard library only.

The file has a header and records: the name of a metric, or a window that refers to metrics by the number of their names.
When the file is full, all but the newest windows are merged into longer slots, the same on all nodes, and the file is
replaced. A reader in another process continues from its last position, and after a replacement skips what it has read.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.metrics.collector import SLOT_S
from toolkit.metrics.ring import limited
from toolkit.metrics.windows import Statistics, Window, merge
from toolkit.rundir.files import is_unwritable, write_bytes
from toolkit.terminal.talk import say_beside

__all__ = ["BYTES_PER_RANK", "WindowFile", "WindowReader", "read_windows"]

BYTES_PER_RANK = 180_000
KEPT_SHARE = 4  # the newest 1/4 of the windows is never merged
MOST_WAITING = 4096  # windows kept while the disk is full

_MAGIC = b"TKWINDW\2"
_HEADER = struct.Struct("<8sQ64s")  # magic, number of replacements, host
_RECORD = struct.Struct("<cHI")  # kind, size and checksum of the content
_WINDOW = struct.Struct("<IddqqQB")  # rank, start, seconds, first and last step, steps, number of metrics
_METRIC = struct.Struct("<B5f")  # name, mean, minimum, maximum, median, 95th percentile
_NAME, _OF_STEPS = b"N", b"W"
_MOST_NAMES = 255


class WindowFile:
    """Appends windows. Only one process may write a file; it may continue a file that it has written before."""

    def __init__(self, path: Path, host: str, bytes_per_rank: int = BYTES_PER_RANK) -> None:
        """Create the file, or continue it after its last complete record.

        Raises:
            OSError: the file cannot be written.
            ToolkitError: it is not a file of windows.
        """
        self.path = path
        self._host, self._bytes_per_rank = host, bytes_per_rank
        self._names: dict[str, int] = {}
        self._ranks: set[int] = set()
        self._waiting: list[Window] = []
        self._replacements = 0
        if path.exists():
            reader = WindowReader(path)
            self._ranks = {window.rank for window in reader.new()}
            self._names = {name: number for number, name in enumerate(reader.names)}
            self._replacements = reader.replacements
            os.truncate(path, reader.offset)
        else:
            self._replace([])

    def append(self, windows: Iterable[Window]) -> None:
        """Append windows in the order of time. On a full disk, report it once, and keep them for the next call."""
        was_full = bool(self._waiting)
        self._waiting = [*self._waiting, *windows][-MOST_WAITING:]
        if not self._waiting:
            return
        try:
            self._write()
        except OSError as error:
            if not is_unwritable(error):
                raise
            if not was_full:
                say_beside(f"cannot write {self.path}, will retry: {error.strerror}")
            return
        self._waiting = []

    def _write(self) -> None:
        names = self._names.copy()
        data = b"".join(_packed(window, names) for window in self._waiting)
        self._ranks |= {window.rank for window in self._waiting}
        size = self.path.stat().st_size
        if size + len(data) > self._bytes_per_rank * len(self._ranks):
            self._replace(_compacted([*read_windows(self.path), *self._waiting]))
            return
        with self.path.open("ab", buffering=0) as stream:
            try:
                if stream.write(data) != len(data):
                    raise OSError(errno.ENOSPC, "no free space for a whole record")
            except OSError:
                with suppress(OSError):
                    stream.truncate(size)
                raise
        self._names = names

    def _replace(self, windows: Sequence[Window]) -> None:
        names: dict[str, int] = {}
        data = b"".join(_packed(window, names) for window in windows)
        header = _HEADER.pack(_MAGIC, self._replacements + 1, self._host.encode()[:64])
        write_bytes(self.path, header + data, durable=False)
        self._names, self._replacements = names, self._replacements + 1


def _packed(window: Window, names: dict[str, int]) -> bytes:
    """Return the record of a window, after records of the names that it adds to `names`."""
    found = b""
    metrics = b""
    count = 0
    for name, statistics in window.metrics.items():
        if name not in names:
            if len(names) == _MOST_NAMES:
                continue
            names[name] = len(names)
            found += _record(_NAME, name.encode())
        values = (statistics.mean, statistics.minimum, statistics.maximum, statistics.median, statistics.p95)
        metrics += _METRIC.pack(names[name], *map(limited, values))
        count += 1
    head = _WINDOW.pack(
        window.rank, window.began_s, window.seconds, window.first_step, window.last_step, window.steps, count
    )
    return found + _record(_OF_STEPS, head + metrics)


def _record(kind: bytes, content: bytes) -> bytes:
    return _RECORD.pack(kind, len(content), zlib.crc32(content)) + content


def _compacted(windows: Sequence[Window]) -> list[Window]:
    """Return at most 3/4 of the windows of each rank: the newest as they are, the others merged into longer slots."""
    starts = sorted({window.began_s for window in windows})
    recent_s = starts[-(len(starts) // KEPT_SHARE) or len(starts)]
    old, recent = (
        [window for window in windows if (window.began_s >= recent_s) is is_recent] for is_recent in (False, True)
    )
    seconds = 2.0 * SLOT_S
    while len({start // seconds for start in starts if start < recent_s}) > len(starts) // 2:
        seconds *= 2
    slots: dict[tuple[float, int], list[Window]] = {}
    for window in old:
        slots.setdefault((window.began_s // seconds, window.rank), []).append(window)
    return [*(merge(slot) for _, slot in sorted(slots.items())), *recent]


class WindowReader:
    """Reads the windows that were added since the last call, while another process appends to the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.host = ""
        self.names: list[str] = []
        self.offset = 0  # the end of the last complete record
        self.replacements = 0
        self._ends_s: dict[int, float] = {}  # of the last window of each rank

    def new(self) -> list[Window]:
        """Return the windows since the last call; [] if there is no file.

        Raises:
            ToolkitError: not a file of windows.
        """
        windows = [self._window(content) for content in self.contents()]
        found = [window for window in windows if window.began_s >= self._ends_s.get(window.rank, 0.0)]
        for window in found:
            self._ends_s[window.rank] = max(self._ends_s.get(window.rank, 0.0), window.began_s + window.seconds)
        return found

    def contents(self) -> list[bytes]:
        """Return the new windows as packed in the file; after a replacement of the file also those read before."""
        try:
            with self.path.open("rb") as stream:
                header = stream.read(_HEADER.size)
                if not self._is_known(header):
                    return []
                stream.seek(self.offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        return self._complete(data)

    def _is_known(self, header: bytes) -> bool:
        """Check the header, and start again in a file that replaced the last one; return False for an incomplete one."""
        if len(header) < _HEADER.size and _MAGIC.startswith(header[: len(_MAGIC)]):
            return False
        if not header.startswith(_MAGIC):
            raise ToolkitError(
                "not a file of windows of this version of toolkit", where=str(self.path),
                fix="delete the file; only the metrics of one node depend on it",
            )  # fmt: skip
        _, replacements, host = _HEADER.unpack(header)
        if replacements != self.replacements:
            self.offset, self.names, self.replacements = _HEADER.size, [], replacements
            self.host = host.rstrip(b"\0").decode(errors="replace")
        return True

    def _complete(self, data: bytes) -> list[bytes]:
        """Return the windows of the complete records of `data`, which ends before a torn or damaged one."""
        found: list[bytes] = []
        at = 0
        while at + _RECORD.size <= len(data):
            kind, size, checksum = _RECORD.unpack_from(data, at)
            content = data[at + _RECORD.size : at + _RECORD.size + size]
            if len(content) < size or zlib.crc32(content) != checksum:
                break
            if kind == _NAME:
                self.names.append(content.decode(errors="replace"))
            elif kind == _OF_STEPS:
                found.append(content)
            at += _RECORD.size + size
        self.offset += at
        return found

    def _window(self, content: bytes) -> Window:
        rank, began_s, seconds, first_step, last_step, steps, _ = _WINDOW.unpack_from(content)
        metrics = {
            self.names[number]: Statistics(*values) for number, *values in _METRIC.iter_unpack(content[_WINDOW.size :])
        }
        return Window(rank, self.host, began_s, seconds, first_step, last_step, steps, metrics)


def read_windows(path: Path) -> list[Window]:
    """Return all windows of a file, in the order of time for each rank. Raises the errors of `WindowReader.new`."""
    return WindowReader(path).new()

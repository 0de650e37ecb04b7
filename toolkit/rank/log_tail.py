"""Follow the log of a rank at a bounded cost. Standard library only."""

import os
import re
from pathlib import Path

from toolkit.rundir.rank_logs import is_shared, label_of
from toolkit.terminal.talk import clean

__all__ = ["BURST_BYTES", "LONGEST_LINE", "PERIOD_S", "TICK_BYTES", "LogTail"]

PERIOD_S = 0.1
TICK_BYTES = 1 << 12  # read per period, of more only the newest lines (benchmarks/step_lines_cost.py)
BURST_BYTES = 1 << 20  # read at once after quieter periods
LONGEST_LINE = 1 << 12  # characters; what follows in a longer line is not searched
_WHOLE_S = 1.0  # after which the text of a progress bar, which ends with the next one, is whole
_LINE_END = re.compile(rb"[\r\n]")


class LogTail:
    """The new lines of a log, to be read every `PERIOD_S`. Lines end at a line feed or carriage return.

    The log may be shared by ranks, moved or truncated. `skipped` is the number of bytes that were not read.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        """Open the log of a rank; OSError if it does not exist."""
        self._log = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._label = label_of(rank).encode() if is_shared(path) else b""
        self._offset, self._allowance = 0, BURST_BYTES
        self._rest = b""  # the beginning of an unfinished line
        self._rest_age_s = 0.0
        self._is_bar = False  # whether a carriage return precedes the unfinished line
        self.skipped = 0

    def new(self, *, is_over: bool = False) -> list[str]:
        """Return the lines since the last call; the last one needs no end if the writer `is_over`."""
        read = self._read()
        data = self._rest + read
        end = data.rfind(b"\n") + 1 if self._label else max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._rest_age_s = 0.0 if read else self._rest_age_s + PERIOD_S
        if is_over or (self._is_bar and self._rest_age_s >= _WHOLE_S):
            end = len(data)
        if end:
            self._is_bar = data[end - 1 : end] == b"\r"
        whole, self._rest = data[:end], data[end : end + LONGEST_LINE]
        if self._label:
            lines = whole.split(b"\n")
            whole = b"\n".join(line.removeprefix(self._label) for line in lines if line.startswith(self._label))
        text = whole.decode("utf-8", "replace").replace("\r", "\n")
        cut = (line[:LONGEST_LINE] for line in text.split("\n") if line)
        return [clean(line) if "\x1b" in line else line for line in cut]

    def _read(self) -> bytes:
        # No call of stat while there is new text: on NFS it would write the text to the server first.
        most = self._allowance = min(BURST_BYTES, self._allowance + TICK_BYTES)
        data = os.pread(self._log, most, self._offset)
        if not data and os.fstat(self._log).st_size < self._offset:  # the log was truncated
            self._offset, self._rest = 0, b""
            data = os.pread(self._log, most, 0)
        elif len(data) == most and (size := os.fstat(self._log).st_size) > self._offset + most:
            data, self._rest = self._newest(size, most), b""
            self._allowance = len(data)
            self.skipped += size - self._offset - len(data)
            self._offset = size - len(data)
        self._offset += len(data)
        self._allowance -= len(data)
        return data

    def _newest(self, size: int, most: int) -> bytes:
        """Return the newest bytes from the beginning of a line on, with at least one whole line if it is not huge."""
        while True:
            data = os.pread(self._log, most, size - most)
            first = _LINE_END.search(data)
            if first is not None and max(data.rfind(b"\n"), data.rfind(b"\r")) > first.start():
                return data[first.end() :]
            if most >= min(BURST_BYTES, size):
                return data
            most = min(4 * most, size)

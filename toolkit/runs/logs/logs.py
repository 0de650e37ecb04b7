"""Read logs line by line: from the end, from the start, in order of time, and as they grow."""

import heapq
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path

from toolkit.errors import CheckFailedError, NotFoundError
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.tail import LONGEST_LINE_BYTES, SEARCHED_BYTES, last_lines
from toolkit.runs.logs.log_choice import LogChoice, LogPart, choose_logs
from toolkit.terminal.talk import clean

__all__ = ["FOLLOW_PERIOD_S", "LogReader", "for_terminal", "in_blocks", "read_by_time", "read_logs"]

FOLLOW_PERIOD_S = 0.3
BLOCK_LETTERS = 1 << 16
SEARCHED_LINES = 1000  # read from each log at a time
_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
# The time near the start of a line: 2026-11-22T17:53:28.120Z, or with "," for "." as Python's logging writes it.
_TIME = re.compile(
    r"^.{0,40}?(\d{4})[-/](\d\d)[-/](\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6})\d*)?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)


def for_terminal(line: str) -> str:
    """Return a program's line with its colors but without other escapes, which could move the cursor or set titles."""
    parts = _COLOUR.split(line.rstrip("\r").rpartition("\r")[2])  # every second part is an escape that sets a color
    shown = "".join(part if place % 2 else clean(part) for place, part in enumerate(parts))
    return shown + "\x1b[0m" if len(parts) > 1 else shown


@dataclass
class LogReader:
    """Reads what was appended to logs since the last call.

    Lines are complete and have their newline. A line of more than 1 MiB is split into pieces; only the last one has the
    newline. Bytes that are not UTF-8 are decoded with `surrogateescape`.
    """

    offsets: dict[Path, int] = field(default_factory=dict)
    _inside: dict[Path, bool] = field(default_factory=dict)  # whether the split line is shown, for each log inside one

    def read(self, parts: Iterable[LogPart], *, to_the_end: bool = False) -> Iterator[str]:
        """Yield the new lines; `to_the_end` includes an incomplete last line, because the log will not grow."""
        for part in parts:
            with part.path.open("rb") as stream:
                stream.seek(self.offsets.get(part.path, 0))
                while line := stream.readline(LONGEST_LINE_BYTES):
                    ended = line.endswith(b"\n")
                    if not ended and len(line) < LONGEST_LINE_BYTES and not to_the_end:
                        break
                    self.offsets[part.path] = self.offsets.get(part.path, 0) + len(line)
                    text = self._piece(part, line.decode("utf-8", "surrogateescape").removesuffix("\n"), last=ended)
                    if text is not None:
                        yield text + ("\n" if ended or len(line) < LONGEST_LINE_BYTES else "")

    def _piece(self, part: LogPart, piece: str, *, last: bool) -> str | None:
        """Return the displayed part of a line or piece; the first piece gets the label, and decides for the others."""
        if (inside := self._inside.get(part.path)) is not None:
            text = piece if inside else None
        else:
            text = part.shown(piece)
            inside = text is not None
        if last:
            self._inside.pop(part.path, None)
        else:
            self._inside[part.path] = inside
        return text

    def read_last(self, part: LogPart, lines: int, *, to_the_end: bool, say: Callable[[str], object]) -> Iterator[str]:
        """Yield the last lines of a log; `read` continues after them."""
        tail = last_lines(part.path, lines, shown=part.shown, unfinished=to_the_end)
        self.offsets[part.path] = tail.end
        if tail.gave_up:
            say(
                f"{part.path}: found only {len(tail.lines)} of {lines} lines in the last {SEARCHED_BYTES >> 20} MiB, "
                "or after a line of more than 1 MiB; omit -n to read the whole log"
            )
        yield from (line + "\n" for line in tail.lines)


def read_logs(
    run: RunDirectory,
    choice: LogChoice,
    *,
    lines: int,
    follow: bool,
    over: Callable[[], bool],
    say: Callable[[str], object],
) -> Iterator[str]:
    """Yield the last `lines` lines of each log (0: all), then, with `follow`, what is appended until `over()`.

    `follow` waits for a log that does not exist yet. `say` receives a message if not all lines were found.

    Raises:
        NotFoundError: there is no such log, and it can no longer appear.
    """
    reader = LogReader()
    first = True
    while True:
        done = not follow or over()  # checked before the read, which then includes the last lines
        try:
            parts = choose_logs(run, choice)
        except NotFoundError:
            if done:
                raise
            parts = []
        for part in parts:
            if first and lines:
                yield from reader.read_last(part, lines, to_the_end=done, say=say)
            else:
                yield from reader.read([part], to_the_end=done)
        if done:
            return
        first = first and not parts
        time.sleep(FOLLOW_PERIOD_S)


def read_by_time(parts: Sequence[LogPart], *, lines: int, say: Callable[[str], object]) -> Iterator[str]:
    """Yield the last `lines` lines of all logs together (0: all), ordered by the time at the start of each line.

    A line without a time follows the line before it.

    Raises:
        CheckFailedError: no line has a time.
    """

    def texts(part: LogPart) -> Iterator[str]:
        if lines:
            return LogReader().read_last(part, lines, to_the_end=True, say=say)
        return LogReader().read([part], to_the_end=True)

    if not any(_time_of(line) for part in parts for line in islice(texts(part), SEARCHED_LINES)):
        raise CheckFailedError(
            "no line begins with a time, such as 2026-11-22 17:53:28, so the lines cannot be merged",
            where=str(parts[0].path.parent),
            fix="omit --by-time; -f prints lines as they are written",
        )
    in_order = heapq.merge(*(_timed(texts(part)) for part in parts), key=lambda timed: timed[0])
    yield from (line for _, line in (deque(in_order, maxlen=lines) if lines else in_order))


def in_blocks(lines: Iterable[str]) -> Iterator[str]:
    """Join lines into larger blocks, which are faster to write."""
    block: list[str] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size > BLOCK_LETTERS:
            yield "".join(block)
            block, size = [], 0
    if block:
        yield "".join(block)


def _timed(lines: Iterable[str]) -> Iterator[tuple[float, str]]:
    latest = 0.0
    for line in lines:
        latest = max(latest, _time_of(line))
        yield latest, line


def _time_of(line: str) -> float:
    """Return seconds since the epoch; 0 without a time. A time without a zone is this host's."""
    match = _TIME.match(line)
    if match is None:
        return 0.0
    year, month, day, clock, fraction, zone = match.groups()
    try:
        return datetime.fromisoformat(
            f"{year}-{month}-{day}T{clock}.{(fraction or '0').ljust(6, '0')}{zone or ''}"
        ).timestamp()
    except ValueError:
        return 0.0

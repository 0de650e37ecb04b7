"""Draw a timeline in text: a bar for each row, its events, and a legend."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import click

from toolkit.runs.timeline.life import Mark, What
from toolkit.runs.timeline.timeline import Row, Timeline
from toolkit.terminal.talk import clean
from toolkit.units import format_duration

__all__ = ["Pen", "lines_of"]

NARROWEST, WIDEST = 60, 200
MOST_EVENTS = 20
_NAME, _END = 14, 14  # maximum characters of a row's name and end
_DAY_S = 86400.0

# The Unicode character, the ASCII character, the color.
_GLYPHS = {
    What.WAITING: ("·", ".", "bright_black"), What.STARTING: ("░", "-", "yellow"), What.STEPS: ("█", "=", "green"),
    What.SAVING: ("▓", "s", "blue"), What.LOST: ("▒", "x", "red"),
}  # fmt: skip
_WORDS = {
    What.WAITING: "in the queue", What.STARTING: "starting", What.STEPS: "running", What.SAVING: "saving",
    What.LOST: "lost steps",
}  # fmt: skip
_LETTERS = {
    "completed": "E", "crashed": "C", "environment": "I", "stalled": "S", "refused": "F", "launch_failed": "L", "supervisor_failed": "V",
    "supervisor_lost": "V", "node_lost": "N", "node_unfit": "U", "walltime": "W", "preempted": "P", "stopped": "T",
    "cancelled": "X", "resumed": "R", "killed": "K", "ended": "e",
}  # fmt: skip


@dataclass(frozen=True)
class Pen:
    """The properties of the terminal to draw on; `width` is in columns."""

    width: int
    unicode: bool
    colour: bool

    def glyph(self, what: What) -> str:
        unicode, ascii_letter, colour = _GLYPHS[what]
        return self.paint(unicode if self.unicode else ascii_letter, colour)

    def paint(self, text: str, colour: str) -> str:
        return click.style(text, fg=colour) if self.colour else text


@dataclass(frozen=True)
class _Scale:
    """Converts between times and columns."""

    began: float
    seconds: float
    columns: int

    def column(self, moment: float) -> int:
        return min(self.columns - 1, max(0, int((moment - self.began) / self.seconds * self.columns)))

    def moment(self, column: float) -> float:
        return self.began + column * self.seconds / self.columns


def lines_of(timeline: Timeline, pen: Pen) -> Iterator[str]:
    """Yield the lines of the picture, at most `pen.width` wide, except for the list of events."""
    status, spent = timeline.status, timeline.ended - timeline.began
    yield f"{status.job_name} {status.run_id}: {status.state.value}" + (f", {format_duration(spent)}" if spent else "")
    if not timeline.rows:
        yield clean(status.reason)
        return
    names = min(_NAME, max(len(row.name) for row in timeline.rows))
    ends = min(_END, max(len(row.end) for row in timeline.rows))
    columns = min(WIDEST, max(NARROWEST, pen.width)) - names - ends - 2
    scale = _Scale(timeline.began, max(spent, 1e-3), columns)
    yield " " * (names + 1) + _axis(scale)
    for row in timeline.rows:
        name = row.name if len(row.name) <= names else row.name[: names - 1] + "~"
        yield f"{name:{names}} {_bar(row, scale, pen)} {row.end[:ends]}".rstrip()
        if row.marks:
            yield (" " * (names + 1) + _marks(row.marks, scale)).rstrip()
    yield from _legend(timeline, pen)
    yield from textwrap.wrap(_where_the_time_went(timeline), scale.columns + names + ends + 2)
    yield from _events(timeline)


def _axis(scale: _Scale) -> str:
    """Return the time axis in the local time zone, with as many times as fit."""
    form = "%H:%M:%S" if scale.seconds < _DAY_S else "%m-%d %H:%M"
    length = len(datetime.now().strftime(form))
    count = max(1, (scale.columns - length) // (length + 6))
    line = ""
    for number in range(count + 1):
        column = number * (scale.columns - length) // count
        at = scale.moment(column) if number < count else scale.began + scale.seconds
        line = line.ljust(column) + datetime.fromtimestamp(at).strftime(form)
    return line


def _bar(row: Row, scale: _Scale, pen: Pen) -> str:
    """Return a bar: each column shows its longest activity, and waiting only if there was nothing else."""
    taken: list[dict[What, float]] = [{} for _ in range(scale.columns)]
    for span in row.spans:
        for column in range(scale.column(span.began), scale.column(span.ended) + 1):
            seconds = min(span.ended, scale.moment(column + 1)) - max(span.began, scale.moment(column))
            if seconds > 0:
                taken[column][span.what] = taken[column].get(span.what, 0.0) + seconds
    return "".join(
        pen.glyph(max(cell, key=lambda what: (what is not What.WAITING, cell[what]))) if cell else " " for cell in taken
    )


def _marks(marks: Sequence[Mark], scale: _Scale) -> str:
    """Return a line with a character per event; if a column is occupied, the event moves to the next free one."""
    line = [" "] * (scale.columns + len(marks))
    for mark in sorted(marks, key=lambda mark: mark.time):
        column = scale.column(mark.time)
        while line[column] != " ":
            column += 1
        line[column] = _LETTERS.get(mark.what, "?")
    return "".join(line)


def _legend(timeline: Timeline, pen: Pen) -> Iterator[str]:
    whats = {span.what for row in timeline.rows for span in row.spans}
    marks = {mark.what for row in timeline.rows for mark in row.marks}
    bars = [f"{pen.glyph(what)} {_WORDS[what]}" for what in What if what in whats]
    letters = [f"{letter} {what.replace('_', ' ')}" for what, letter in _LETTERS.items() if what in marks]
    yield ""
    yield "  ".join(bars)
    if letters:
        yield "  ".join(letters)


def _where_the_time_went(timeline: Timeline) -> str:
    spent = timeline.seconds
    whole = sum(spent.values()) or 1.0
    shares = [f"{_WORDS[what]} {format_duration(s)} ({100 * s / whole:.0f} %)" for what, s in spent.items() if s]
    return f"{format_duration(whole)}: {', '.join(shares)}" + (", all tasks together" if timeline.status.tasks else "")


def _events(timeline: Timeline) -> Iterator[str]:
    events = sorted(((mark, row) for row in timeline.rows for mark in row.marks), key=lambda one: one[0].time)
    if timeline.status.tasks is not None:  # many tasks complete, and their ends would hide other events
        events = [(mark, row) for mark, row in events if mark.what != "completed"]
    if events:
        yield ""
    if len(events) > MOST_EVENTS:
        yield f"the last {MOST_EVENTS} of {len(events)} events; --json prints all"
    for mark, row in events[-MOST_EVENTS:]:
        yield clean(f"{datetime.fromtimestamp(mark.time):%m-%d %H:%M:%S} {row.name}: {mark.words}".replace("\n", " "))

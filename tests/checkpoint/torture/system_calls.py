"""What strace wrote down of a process, as calls with their threads and times."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torture_scale import spread

_LINE = re.compile(r"(?P<thread>\d+) +(?:(?P<start>\d+\.\d+) )?(?P<rest>.*)")
_CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+|\?)(?P<more>.*)", re.DOTALL)
_RESUMED = re.compile(r"<\.\.\. (?P<name>\w+) resumed>(?P<rest>.*)")
_LASTED = re.compile(r"<(\d+\.\d+)>$")


@dataclass(frozen=True)
class Call:
    """One system call. Times are seconds since the epoch, where strace was told to write them (-ttt -T)."""

    thread: int
    name: str
    arguments: str
    result: int
    start: float = 0.0
    end: float = 0.0


def calls_in(log: Path) -> Iterator[Call]:
    """The calls that returned, in the order in which they did."""
    begun: dict[int, tuple[str, float]] = {}
    with log.open(encoding="ascii", errors="surrogateescape") as lines:
        for line in lines:
            found = _LINE.fullmatch(line.rstrip("\n"))
            if found is None:
                continue
            thread, start, rest = int(found["thread"]), float(found["start"] or 0), found["rest"]
            if rest.endswith("<unfinished ...>"):
                begun[thread] = (rest.removesuffix("<unfinished ...>"), start)
                continue
            resumed = _RESUMED.fullmatch(rest)
            if resumed is not None:
                head, start = begun.pop(thread, ("", start))
                rest = head + resumed["rest"]
            call = _CALL.fullmatch(rest)
            if call is None or call["result"] == "?":
                continue
            lasted = _LASTED.search(call["more"])
            end = start + (float(lasted[1]) if lasted else 0.0)
            yield Call(thread, call["name"], call["arguments"], int(call["result"]), start, end)


@dataclass(frozen=True)
class Moment:
    """The `number`-th call of a name in its thread, as strace counts for its faults."""

    call: str
    number: int


def moments(log: Path, directory: Path, *, first: str = "", end: str = "\0") -> list[Moment]:
    """All moments at which a process changes something in `directory`, in the order of their calls.

    Only those from the first call on that names `first`, and before the one that names `end`. A fault befalls the thread
    that is the first to make so many calls: where that is another call than the one wanted, there is no such moment.
    """
    counts: Counter[tuple[int, str]] = Counter()
    seen: set[Moment] = set()
    found: list[Moment] = []
    begun = False
    for call in calls_in(log):
        counts[call.thread, call.name] += 1
        begun |= first in call.arguments
        if end in call.arguments:
            break
        moment = Moment(call.name, counts[call.thread, call.name])
        if begun and str(directory) in call.arguments and moment not in seen:
            found.append(moment)
        seen.add(moment)
    return found


def moment_of(log: Path, names: tuple[str, ...], pattern: str) -> Moment:
    """The first call of one of these names in whose arguments a pattern is found.

    Raises:
        LookupError: there is none.
    """
    counts: Counter[tuple[int, str]] = Counter()
    for call in calls_in(log):
        counts[call.thread, call.name] += 1
        if call.name in names and re.search(pattern, call.arguments):
            return Moment(call.name, counts[call.thread, call.name])
    raise LookupError(f"no {' or '.join(names)} of {pattern} in {log}")


def chosen(of_rank: list[Moment], most: int) -> list[Moment]:
    """Moments of all kinds of calls in turn: a save has ten times more writes than renames."""
    by_call = defaultdict(list)
    for moment in of_rank:
        by_call[moment.call].append(moment)
    rarest_first = sorted(by_call, key=lambda call: len(by_call[call]))
    if most < len(by_call):
        choose = random.Random(len(of_rank))
        return [choose.choice(by_call[call]) for call in choose.sample(rarest_first, most)]
    found: list[Moment] = []
    for place, call in enumerate(rarest_first):
        found += spread(by_call[call], -(-(most - len(found)) // (len(by_call) - place)))
    return found

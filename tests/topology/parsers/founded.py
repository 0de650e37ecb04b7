"""Whether every name and number of an answer stands in the text, and the facts of one record together there.

Checked: each string (also the names of a dict), whole and between other letters, or as one of the hosts that a list such
as n[1-3] on a line names; each number, by its value, or as the length of a list or dict of the answer; and each record of
a list: its facts stand together on no more lines than a record of the undamaged text has. Not checked: true and false,
the order of a list, and what `rules.DERIVED` says is derived without a check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

from rules import DERIVED, FREE

from toolkit.errors import ToolkitError
from toolkit.slurm.hostlist import expand_hostlist

NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|0x[0-9a-fA-F]+")
WORD = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
HOSTS = re.compile(r"[A-Za-z0-9._-]*(?:\[[0-9,\s-]+\][A-Za-z0-9._-]*)+")
MOST_LINES_OF_RANGES = 4000
SLACK = 2  # further lines of a record that has several: one may be doubled, or put between them

Leaf = tuple[tuple[str, ...], Any]
Window = tuple[int, int]


class Text:
    """A text by its words: on which lines something stands."""

    def __init__(self, text: str) -> None:
        self.lines = [" ".join(line.split()) for line in text.replace("\r", "").split("\n")]
        self.whole = " ".join(" ".join(self.lines).split())
        self._found: dict[Any, frozenset[int]] = {}

    def find(self, value: str | float) -> frozenset[int]:
        """The lines that hold a name or number; all lines where it stands across a line end."""
        key = (type(value) is str, value)
        if key not in self._found:
            self._found[key] = self._find_name(value) if isinstance(value, str) else self._find_number(value)
        return self._found[key]

    def _find_name(self, value: str) -> frozenset[int]:
        name = " ".join(value.split())
        if name in self.words or name in self.hosts:
            return frozenset(self.words.get(name, set()) | self.hosts.get(name, set()))
        pattern = re.compile(_edge(name[:1], "(?<!{})") + re.escape(name) + _edge(name[-1:], "(?!{})"))
        found = {number for number, line in enumerate(self.lines) if name in line and pattern.search(line)}
        if not found and pattern.search(self.whole):
            found = set(range(len(self.lines)))
        return frozenset(found)

    def _find_number(self, value: float) -> frozenset[int]:
        return frozenset(self.numbers.get(abs(float(value)), ()))

    @cached_property
    def numbers(self) -> dict[float, set[int]]:
        found: dict[float, set[int]] = {}
        for number, line in enumerate(self.lines):
            for word in NUMBER.findall(line):
                found.setdefault(float(int(word, 16) if word.startswith("0x") else float(word)), set()).add(number)
        return found

    @cached_property
    def words(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for number, line in enumerate(self.lines):
            for word in WORD.findall(line):
                found.setdefault(word, set()).add(number)
        return found

    @cached_property
    def hosts(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for number, line in enumerate(self.lines[:MOST_LINES_OF_RANGES]):
            for ranges in HOSTS.findall(line):
                try:
                    names = expand_hostlist(ranges)
                except ToolkitError:
                    continue
                for name in names:
                    found.setdefault(name, set()).add(number)
        return found


def _edge(letter: str, pattern: str) -> str:
    """A name that begins or ends with a letter or digit must not go on there."""
    return pattern.format("[A-Za-z0-9_]") if letter.isalnum() else ""


def unfounded(
    kind: str, answer: Mapping[str, Any], text: str, whole_answer: Mapping[str, Any], whole: str
) -> list[str]:
    """What the answer to `text` says without a line for it; `whole` is the text before the accident, with its answer."""
    here, before = Text(text), Text(whole)
    lengths = {len(value) for value in _containers(answer)} | {0}
    problems = []
    for path, leaf in leaves(answer):
        rule = rule_of(kind, path)
        if rule is FREE:
            continue
        if rule is not None:
            if not rule(leaf, answer, text):
                problems.append(f"{'.'.join(path)} = {leaf!r} does not follow from the text")
        elif not here.find(leaf) and not (isinstance(leaf, int) and leaf in lengths):
            problems.append(f"{'.'.join(path)} = {leaf!r} stands nowhere")
    allowed = {place: _longest(windows, before) for place, windows in _windows(kind, whole_answer, before).items()}
    for place, windows in _windows(kind, answer, here).items():
        most = allowed.get(place, len(before.lines))
        wide = [end - begin + 1 for begin, end in windows if end - begin >= most]
        problems += [f"a record of {place} is put together from {span} lines" for span in wide]
    return problems


def _longest(windows: list[Window], text: Text) -> int:
    """How many lines a record may take up: one, or where they have several those up to the next, and slack."""
    if all(begin == end for begin, end in windows):
        return 1
    begins = sorted({begin for begin, _ in windows})
    return max(later - sooner for sooner, later in pairwise([*begins, len(text.lines)])) + SLACK


def leaves(value: Any, path: tuple[str, ...] = (), *, in_list: bool = False) -> Iterator[Leaf]:
    """Every name and number of an answer, with the keys that lead to it; null, true, false and "" say nothing."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if len(path) == 1 and not in_list:  # {"GPU0": ...}; the keys further out and further in are the format's
                yield (*path, "{}"), key
            yield from leaves(entry, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from leaves(entry, path, in_list=True)
    elif value is not None and value != "" and not isinstance(value, bool):
        yield path, value


def rule_of(kind: str, path: tuple[str, ...]) -> Any:
    """How a key's values follow from the text, None where they stand in it. A rule for a key holds for all below it."""
    rules = DERIVED.get(kind, {})
    return next((rules[key] for key in ".".join(path).split(".") if key in rules), None)


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        yield value
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _containers(entry)


def _windows(kind: str, answer: Mapping[str, Any], text: Text) -> dict[str, list[Window]]:
    """The fewest lines that hold the facts of each record of each list."""
    found: dict[str, list[Window]] = {}
    for key, value in answer.items():
        if not (isinstance(value, list) and value and isinstance(value[0], Mapping)) or rule_of(kind, (key,)) is FREE:
            continue
        for record in value:
            facts = leaves(record, (key,), in_list=True)
            its = {json.dumps(leaf): leaf for path, leaf in facts if rule_of(kind, path) is None}
            places = [lines for leaf in its.values() if 0 < len(lines := text.find(leaf)) < len(text.lines)]
            found.setdefault(key, []).append(narrowest(places))
    return found


def narrowest(places: list[frozenset[int]]) -> Window:
    """The fewest lines in a row that hold one of each: the first and the last of them."""
    marks = sorted((line, which) for which, lines in enumerate(places) for line in lines)
    held: dict[int, int] = {}
    best = (marks[0][0], marks[-1][0]) if marks else (0, 0)
    for line, which in marks:
        held[which] = line
        begin = min(held.values())
        if len(held) == len(places) and line - begin < best[1] - best[0]:
            best = (begin, line)
    return best

"""Accidents of a printed text: one seeded accident at a time, and whether it is one that a reader must notice."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

# What divides the cells of a row, the first of them that makes three cells counts.
DIVIDERS = (r"\t+ *", r"\|#?", r",", r" {2,}", r" +")
TRIES = 20


@dataclass(frozen=True)
class Mutation:
    """A damaged text. `touched` are lines of the whole text, from 0, that were changed, moved or taken away."""

    name: str
    text: str
    touched: tuple[int, ...]
    same_form: bool = False  # a word stands for another one of its form, such as 26 for 256: no format tells
    mid_line: bool = False  # the text ends within a line

    def same_text(self, whole: str) -> bool:
        """Whether only blanks differ."""
        return squeezed(self.text) == squeezed(whole)


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.split("\n") if line.strip()]


def mutations(text: str, seed: str, count: int) -> list[Mutation]:
    """So many accidents of a text, always the same ones for a seed; each changes more than blanks where one can."""
    random = Random(seed)
    made: list[Mutation] = []
    while len(made) < count:
        accident = ACCIDENTS[len(made) % len(ACCIDENTS)]
        tries = (accident(text, random) for _ in range(TRIES))
        mutation = next((one for one in tries if one and not one.same_text(text)), None)
        made.append(mutation or dropped_bytes(text, random))
    return made


def cut(text: str, random: Random) -> Mutation:
    at = random.randrange(1, max(2, len(text)))
    line = text.count("\n", 0, at)
    begun = text[text.rfind("\n", 0, at) + 1 : at]
    rest = text[at:].partition("\n")[0]
    return Mutation(
        "cut", text[:at], tuple(range(line, text.count("\n") + 1)), mid_line=bool(begun.strip() and rest.strip())
    )


def duplicated_line(text: str, random: Random) -> Mutation | None:
    lines = text.split("\n")
    at = _some_line(lines, random)
    return at and _of_lines("line duplicated", [*lines[: at[0] + 1], *lines[at[0] :]], at)


def dropped_line(text: str, random: Random) -> Mutation | None:
    lines = text.split("\n")
    at = _some_line(lines, random)
    return at and _of_lines("line dropped", [*lines[: at[0]], *lines[at[0] + 1 :]], at)


def swapped_lines(text: str, random: Random) -> Mutation | None:
    lines = text.split("\n")
    here, there = _some_line(lines, random), _some_line(lines, random)
    if not here or not there:
        return None
    lines[here[0]], lines[there[0]] = lines[there[0]], lines[here[0]]
    return _of_lines("lines swapped", lines, (*here, *there))


def joined_lines(text: str, random: Random) -> Mutation | None:
    lines = text.split("\n")
    at = random.randrange(len(lines) - 1) if len(lines) > 1 else 0
    if at + 1 >= len(lines) or not lines[at].strip() or not lines[at + 1].strip():
        return None
    return _of_lines("lines joined", [*lines[:at], lines[at] + lines[at + 1], *lines[at + 2 :]], (at, at + 1))


def dropped_bytes(text: str, random: Random) -> Mutation:
    begin = random.randrange(max(1, len(text)))
    end = min(len(text), begin + random.choice((1, 1, 2, 3, 5, 8, 20, 80)))
    line = text.count("\n", 0, begin)
    touched = tuple(range(line, text.count("\n", 0, end) + 1))
    return Mutation("bytes dropped", text[:begin] + text[end:], touched, same_form=_same_form(text, begin, end))


def swapped_cells(text: str, random: Random) -> Mutation | None:
    return _in_rows("cells swapped", text, random, _swap, whole_column=False)


def lost_cell(text: str, random: Random) -> Mutation | None:
    return _in_rows("cell lost", text, random, _lose, whole_column=False)


def swapped_column(text: str, random: Random) -> Mutation | None:
    return _in_rows("column swapped", text, random, _swap, whole_column=True)


def lost_column(text: str, random: Random) -> Mutation | None:
    return _in_rows("column lost", text, random, _lose, whole_column=True)


ACCIDENTS: Sequence[Callable[[str, Random], Mutation | None]] = (
    cut, duplicated_line, swapped_cells, lost_cell, swapped_column, lost_column, dropped_bytes, dropped_line, swapped_lines,
    joined_lines,
)  # fmt: skip


def _some_line(lines: Sequence[str], random: Random) -> tuple[int, ...]:
    """One line that is not empty, if there is one."""
    full = [number for number, line in enumerate(lines) if line.strip()]
    return (random.choice(full),) if full else ()


def _of_lines(name: str, lines: Sequence[str], touched: tuple[int, ...]) -> Mutation:
    return Mutation(name, "\n".join(lines), touched)


def _in_rows(
    name: str, text: str, random: Random, change: Callable[[list[str], int, int], None], *, whole_column: bool
) -> Mutation | None:
    """Two cells of a row change places, or one goes; `whole_column`: in all neighbours with as many cells, too."""
    lines = text.split("\n")
    at = _some_line(lines, random)
    cells = _cells(lines[at[0]]) if at else []
    if len(cells) < 5:
        return None
    here, there = random.sample(range(0, len(cells), 2), 2)
    rows = [at[0]]
    for step in (1, -1) if whole_column else ():
        row = at[0] + step
        while 0 <= row < len(lines) and len(_cells(lines[row])) == len(cells):
            rows.append(row)
            row += step
    if whole_column and len(rows) == 1:
        return None
    same_form = True
    for row in rows:
        its = _cells(lines[row])
        same_form = same_form and change is _swap and _form(its[here]) == _form(its[there])
        change(its, here, there)
        lines[row] = "".join(its)
    return Mutation(name, "\n".join(lines), tuple(sorted(rows)), same_form=same_form)


def _cells(line: str) -> list[str]:
    """Cells and what divides them, by turns; blanks before the first belong to it."""
    body = line.lstrip()
    for divider in DIVIDERS:
        cells = re.split(f"({divider})", body)
        if len(cells) >= 5:
            cells[0] = line[: len(line) - len(body)] + cells[0]
            return cells
    return []


def _swap(cells: list[str], here: int, there: int) -> None:
    cells[here], cells[there] = cells[there], cells[here]


def _lose(cells: list[str], here: int, there: int) -> None:
    del cells[here : here + 2]


def _form(word: str) -> str:
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"[0-9]+", "9", word))


def _same_form(text: str, begin: int, end: int) -> bool:
    """Whether what is dropped is a part of one word, and what is left of it looks as before."""
    left = re.search(r"\S*$", text[:begin])
    right = re.match(r"\S*", text[end:])
    if left is None or right is None or re.search(r"\s", text[begin:end]):
        return False
    return _form(left[0] + text[begin:end] + right[0]) == _form(left[0] + right[0])

"""Sections of `key: value` lines under a header, as the fabric commands print them, and what tells that one is damaged.

The keys of a section come in a fixed order, each once, and each has a form. A value that has not its form is unknown,
and so is a key that stands there with two values: one of its lines belongs to a section whose header is lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.topology.parsers.fabric_lines import Line


@dataclass
class Section:
    """A header and the keys under it; the value of a key whose line is damaged is None."""

    name: str
    line: int
    values: dict[str, str | None] = field(default_factory=dict)
    parts: list[Section] = field(default_factory=list)

    def get(self, key: str) -> str | None:
        """What is printed for a key, None when nothing is or its line is damaged."""
        return self.values.get(key)

    def number(self, key: str) -> int | None:
        """The same as a number, with or without 0x."""
        text = self.values.get(key)
        return None if text is None else int(text, 0 if text.startswith("0x") else 10)

    def chosen(self, names: Mapping[str, str]) -> dict[str, str | None]:
        """The printed values under other names: what is not printed is left out, what is damaged is None."""
        return {name: self.values[key] for name, key in names.items() if key in self.values}


@dataclass(frozen=True)
class Keys:
    """The keys of one sort of section in their order, with the form of their values.

    `whole` are those whose values are words of a closed list, which are right even where the text is cut behind them.
    """

    forms: Mapping[str, re.Pattern[str]]
    whole: frozenset[str] = frozenset()

    def put(self, section: Section, key: str, value: str, line: Line, warnings: list[str]) -> None:
        """Read one line into the section."""
        if key in section.values:
            if section.values[key] == value:
                warnings.append(f"line {line.number}: {key} is printed a second time")
            else:
                warnings.append(f"line {line.number}: a second {key} in one section, so that neither counts")
                section.values[key] = None
            return
        order = list(self.forms)
        if any(order.index(other) > order.index(key) for other in section.values):
            warnings.append(f"line {line.number}: {key} stands behind keys that are printed after it")
        fits = self.forms[key].fullmatch(value)
        if not fits:
            warnings.append(f"line {line.number}: {key} is not read from {value[:60]!r}")
        section.values[key] = value if fits and (not line.cut or key in self.whole) else None

    def warn_of_missing(self, sections: Sequence[Section], what: str, warnings: list[str]) -> None:
        """Name the sections without a key that others have; one that stands alone should have all of them."""
        asked = [key for key in self.forms if len(sections) == 1 or any(key in one.values for one in sections)]
        for section in sections:
            missing = [key for key in asked if key not in section.values]
            if missing:
                warnings.append(f"line {section.line}: {what} {section.name} is without {', '.join(missing)}")


def one_of(*words: str) -> re.Pattern[str]:
    """The form of a value that is one of some words."""
    return re.compile("|".join(map(re.escape, words)))

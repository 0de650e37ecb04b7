"""The records of topology.conf and of `scontrol show topology`: one on a line, made of `Key=value` words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.topology.parsers.lines import Line

_SWITCH, _BLOCK = "switchname", "blockname"
# topology.conf(5) and what scontrol adds. `aggregatedblock` stands for several blocks, which have records of their own.
_OF_RECORD = frozenset(
    {"level", "linkspeed", "nodes", "switches", "blockindex", "blocksize", "children", "parent", "topology"}
)
_SETTING = re.compile(
    r"(?:blocksizes|aggregatedblock|include|topology(?:name)?|clusterdefault)(?:=|\s|$)", re.IGNORECASE
)


@dataclass
class Record:
    """One switch or block. `values` by key in small letters, as printed; None where two values contradict."""

    name: str
    line: int
    is_block: bool
    topology: str = ""  # of the several that topology.yaml may hold
    values: dict[str, str | None] = field(default_factory=dict)


Read = tuple[tuple[Record, ...], tuple[Line, ...], tuple[str, ...]]


def records_of_lines(lines: Sequence[Line]) -> Read:
    """(records, lines that are none, warnings)."""
    records: list[Record] = []
    others: list[Line] = []
    warnings: list[str] = []
    for number, text in _continued(lines):
        words = text.partition("#")[0].split()
        if not words or _SETTING.match(words[0]):
            continue
        names = [word for word in words if word.lower().startswith((f"{_SWITCH}=", f"{_BLOCK}=")) and word[-1] != "="]
        if words[0] not in names:
            others.append(Line(number, text))
            continue
        if len(names) > 1:
            warnings.append(f"line {number}: {len(names)} records stand on one line: line ends are lost")
        for word in words:
            _take(word, number, records, warnings)
    _lacking(records, warnings)
    return tuple(records), tuple(others), tuple(warnings)


def _continued(lines: Sequence[Line]) -> list[Line]:
    """A line that ends with a backslash goes on in the next one."""
    joined: list[Line] = []
    goes_on = False
    for number, text in lines:
        if goes_on:
            joined[-1] = Line(joined[-1].number, joined[-1].text + text)
        else:
            joined.append(Line(number, text))
        goes_on = joined[-1].text.endswith("\\")
        if goes_on:
            joined[-1] = Line(joined[-1].number, joined[-1].text[:-1])
    return joined


def _take(word: str, number: int, records: list[Record], warnings: list[str]) -> None:
    """One `Key=value` of a line whose first one began a record."""
    key, equals, value = word.partition("=")
    key, value = key.lower(), value.strip("\"'")
    if key in (_SWITCH, _BLOCK) and value:
        if re.search(r"[\[\]=,]", value):
            warnings.append(f"line {number}: no name of a switch or block: {value[:60]!r}")
        records.append(Record(value, number, key == _BLOCK))
        return
    record = records[-1]
    if not equals or key not in _OF_RECORD:
        warnings.append(f"line {number}: {record.name}: not known: {word[:60]!r}")
    elif key in record.values:
        warnings.append(f"line {number}: {record.name}: {key} stands there twice")
        if record.values[key] != value:
            record.values[key] = None
    else:
        record.values[key] = value


def _lacking(records: Sequence[Record], warnings: list[str]) -> None:
    """Warn of a record without a key that most others of its sort have."""
    for sort in (True, False):
        alike = [record for record in records if record.is_block is sort]
        count = Counter(key for record in alike for key in record.values)
        common = [key for key, times in count.items() if times * 2 > len(alike) and key not in ("nodes", "switches")]
        for record in alike:
            missing = [key for key in common if key not in record.values]
            missing += (
                [] if {"nodes", "switches"} & record.values.keys() else ["nodes" if sort else "nodes or switches"]
            )
            if missing:
                warnings.append(f"line {record.line}: {record.name or 'a record'} lacks {', '.join(missing)}")

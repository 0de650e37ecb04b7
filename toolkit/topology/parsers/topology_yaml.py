"""The records of topology.yaml (Slurm 25.05 and later), of which only the plain layout of its manual is read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolkit.topology.parsers.lines import Line
from toolkit.topology.parsers.topology_records import Read, Record

_ENTRY = re.compile(r"\s*(?:- +)?([a-z_]+):(?:\s+(.*?))?\s*$")
_SIZE = re.compile(r"\s*- *[0-9]+\s*$")
_GROUPS = frozenset(
    {"tree", "block", "switches", "blocks", "block_sizes", "flat", "cluster_default", "ring3d", "torus3d"}
)
_KEY_IN_CONF = {"children": "switches", "nodes": "nodes"}


def is_yaml(lines: Sequence[Line]) -> bool:
    """Whether it is topology.yaml: its first word names a topology."""
    first = next((text for _, text in lines if text.partition("#")[0].strip() not in ("", "---")), "")
    return bool(re.match(r"\s*- +topology:", first))


def records_of_yaml(lines: Sequence[Line]) -> Read:
    """(records, lines that are none, warnings)."""
    records: list[Record] = []
    others: list[Line] = []
    warnings: list[str] = []
    topology = ""
    open_record = False  # whether what follows belongs to the last record
    for line in lines:
        text = line.text.partition("#")[0]
        match = _ENTRY.match(text)
        if not text.strip() or text.strip() == "---" or _SIZE.match(text):
            continue
        key, value = (match[1], (match[2] or "").strip("\"'")) if match else ("", "")
        begins = "- " in text[: text.find(key)]
        if key == "topology" and begins and value:
            topology, open_record = value, False
        elif key in ("switch", "block") and begins and value:
            records.append(Record(value, line.number, key == "block", topology))
            open_record = True
        elif key in _KEY_IN_CONF and open_record and not begins:
            _add(records[-1], _KEY_IN_CONF[key], value, line.number, warnings)
        elif key in _GROUPS and not begins:
            open_record = False
        else:
            others.append(line)
    for record in records:
        if not record.values:
            warnings.append(f"line {record.line}: {record.name} lacks nodes{'' if record.is_block else ' or children'}")
    return tuple(records), tuple(others), tuple(warnings)


def _add(record: Record, key: str, value: str, number: int, warnings: list[str]) -> None:
    if key in record.values:
        warnings.append(f"line {number}: {record.name}: {key} stands there twice")
        if record.values[key] != value:
            record.values[key] = None
    else:
        record.values[key] = value

"""What `lstopo` prints on a terminal: one object a line, or several with ` + ` between them, indented by its depth.

Objects of a type are numbered in their order (`L#`), and `-v` repeats below the tree how many there are of each: a line
that is lost, doubled or damaged is seen by both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.topology.parsers.distances import Row, read_distances
from toolkit.topology.parsers.host_lines import Line
from toolkit.topology.parsers.lstopo_facts import MEMORY_ALONE, HostObjects, host_objects

_OBJECT = re.compile(
    r"(?P<type>[A-Z][A-Za-z0-9]*)(?:\[(?P<class>[^\]]*)\])?(?:\((?P<subtype>[^)]*)\))?(?: L#(?P<logical>[0-9]{1,6}))?"
    r"(?P<rest>(?: \S.*)?)"
)
_SEVERAL = re.compile(r" \+ (?=[A-Z][A-Za-z0-9]*(?:\([^)]*\))? L#)")
_STATED = re.compile(
    r"\s*(?:Special )?depth -?[0-9]{1,3}:\s+(?P<count>[0-9]{1,6}) (?P<type>[A-Za-z0-9]+) \(type #[0-9]{1,3}\)"
)
_MATRIX = re.compile(r".*NUMALatency.* between (?P<count>[0-9]{1,5}) NUMANodes .*by logical indexes:")
_OTHER_NAMES = {
    "Socket": "Package", "Node": "NUMANode", "PCI": "PCIDev", "L3": "L3Cache", "L2": "L2Cache", "L1": "L1Cache",
    "L1d": "L1dCache", "L1i": "L1iCache", "L4": "L4Cache", "L5": "L5Cache", "L2i": "L2iCache", "L3i": "L3iCache",
    "Net": "OSDev", "Block": "OSDev", "GPU": "OSDev", "CoProc": "OSDev", "Co": "OSDev", "OpenFabrics": "OSDev",
    "DMA": "OSDev", "Memory": "OSDev", "Storage": "OSDev", "Network": "OSDev",
}  # fmt: skip
_TYPES = frozenset(_OTHER_NAMES.values()) | {
    "System", "Machine", "Group", "Die", "Cluster", "Core", "PU", "HostBridge", "PCIBridge", "Bridge", "Misc",
    "MemCache", "MemSideCache", "L2dCache", "L3dCache",
}  # fmt: skip


@dataclass
class _Tree:
    """What was read of the tree so far."""

    warnings: list[str]
    verbose: bool
    counts: Counter[str] = field(default_factory=Counter)
    logical: dict[str, int | None] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    above: list[tuple[int, str, Counter[str]]] = field(default_factory=list)  # indentation, type and types of children
    memory_alone: int = 0
    units: dict[str, int] = field(default_factory=dict)


def is_console(lines: Sequence[Line]) -> bool:
    """Whether there are objects with hwloc's numbers, or the machine with its memory."""
    return any(
        re.match(r"\s*(Machine|System)( L#0)? \(.*\)$", line.text)
        or re.match(r"\s*(NUMANode|Package|Socket|Core|PU|L[1-3][di]?(Cache)?) L#[0-9]+", line.text)
        for line in lines
    )


def read_console(lines: Sequence[Line], warnings: list[str]) -> HostObjects:
    """The facts of the tree; what does not fit is added to the warnings."""
    place = next(
        (place for place, line in enumerate(lines) if "depth " in line.text and _STATED.match(line.text)), len(lines)
    )
    tail = lines[place:]
    verbose = bool(tail) or any(
        " local=" in line.text or " linesize=" in line.text or "(P#0 total=" in line.text for line in lines
    )
    tree = _Tree(warnings, verbose)
    for line in lines[:place]:
        _read_line(tree, line)
    if not tree.above or tree.above[0][1] not in ("Machine", "System"):
        warnings.append(f"line {lines[0].number}: the tree does not begin with the machine")
    last = lines[place - 1].number if place else 1
    _name_empty(tree, 0, last)
    if not tree.counts["PU"] and not tree.counts["Core"]:
        warnings.append(f"line {last}: no cores and no processing units are printed")
    if verbose:
        _compare(tree, tail, last)
        _name_strange(tail, warnings)
        _read_matrix(tree, tail)
    return host_objects(tree.counts, tree.doubtful, tree.memory_alone)


def _read_line(tree: _Tree, line: Line) -> None:
    text = line.text.lstrip()
    indentation = len(line.text) - len(text)
    for place, part in enumerate(_SEVERAL.split(text)):
        match = _OBJECT.fullmatch(part)
        name = _type_of(match) if match else None
        if not match or name is None or not _is_whole(match["rest"]):
            tree.warnings.append(f"line {line.number}: no object of hwloc: {part[:60]!r}")
            tree.doubtful.update([name] if name else _TYPES if match is None else ())
            continue
        if place == 0:
            _descend(tree, line, indentation)
        _add(tree, line, indentation if place == 0 else tree.above[-1][0], name, match)


def _type_of(match: re.Match[str]) -> str | None:
    name = match["type"]
    name = "Group" if re.fullmatch(r"Group[0-9]*", name) else _OTHER_NAMES.get(name, name)
    return name if name in _TYPES else None


def _is_whole(rest: str) -> bool:
    """Whether parentheses are closed, and no second object stands on the line without a ` + `."""
    plain = re.sub(r'"[^"]*"', "", rest)
    return (
        plain.count("(") == plain.count(")") and plain.count('"') == 0 and not re.search(r"\s(L#[0-9]|depth )", plain)
    )


def _descend(tree: _Tree, line: Line, indentation: int) -> None:
    """Go up to the parent of an object; a child stands two columns behind it."""
    _name_empty(tree, indentation, line.number)
    if tree.above and indentation != tree.above[-1][0] + 2:
        tree.warnings.append(f"line {line.number}: indented by {indentation}, below an object at {tree.above[-1][0]}")


def _name_empty(tree: _Tree, indentation: int, number: int) -> None:
    """Leave the objects that end here; packages and cores are never empty."""
    while len(tree.above) > (1 if indentation == 0 and tree.above else 0) and tree.above[-1][0] >= indentation:
        _, name, children = tree.above.pop()
        if name in ("Core", "Package", "L1dCache", "L2Cache", "L3Cache") and not children:
            tree.warnings.append(f"line {number}: the {name} above has nothing in it: lines are lost")
            tree.doubtful.update(("Core", "PU"))


def _add(tree: _Tree, line: Line, indentation: int, name: str, match: re.Match[str]) -> None:
    tree.counts[name] += 1
    numbered = "Bridge" if name.endswith("Bridge") else name
    logical = None if match["logical"] is None else int(match["logical"])
    before = tree.logical.get(numbered, -1)
    if (logical is None) != (before is None) and (numbered in tree.logical or logical is not None):
        tree.warnings.append(f"line {line.number}: some objects {numbered} have a number L#, others none")
        tree.doubtful.add(numbered)
    elif logical is not None and before is not None and logical != before + 1:
        tree.warnings.append(f"line {line.number}: {numbered} L#{logical} stands behind L#{before}")
        tree.doubtful.add(numbered)
    tree.logical[numbered] = logical
    if name == "PU" and (system := re.search(r"P#([0-9]{1,6})\b", match["rest"])):
        if system[1] in tree.units:
            tree.warnings.append(f"line {line.number}: PU P#{system[1]} stands in line {tree.units[system[1]]}, too")
            tree.doubtful.add("PU")
        tree.units.setdefault(system[1], line.number)
    parent = tree.above[-1] if tree.above else (0, "", Counter[str]())
    if name == "NUMANode" and (match["subtype"] in MEMORY_ALONE or parent[2]["NUMANode"]):
        tree.memory_alone += 1
    parent[2][name] += 1
    tree.above.append((indentation, name, Counter()))


def _compare(tree: _Tree, tail: Sequence[Line], last: int) -> None:
    """Compare the tree with the numbers of objects that stand below it."""
    stated: dict[str, int] = {}
    for line in tail:
        match = _STATED.fullmatch(line.text)
        name = match and _OTHER_NAMES.get(match["type"], match["type"])
        if match is None or name is None:
            if re.match(r"\s*(Special )?depth", line.text) or " depth " in line.text.replace("(depth", ""):
                tree.warnings.append(f"line {line.number}: not the number of one type of objects: {line.text[:60]!r}")
            continue
        if name in stated:
            tree.warnings.append(f"line {line.number}: the number of {name} stands in an earlier line, too")
        if name not in _TYPES:
            tree.warnings.append(f"line {line.number}: no type of hwloc: {name!r}")
        found = sum(
            n for other, n in tree.counts.items() if other == name or (name == "Bridge" and other.endswith("Bridge"))
        )
        if found != int(match["count"]):
            tree.warnings.append(f"line {line.number}: {match['count']} {name}, but {found} are printed")
            tree.doubtful.add(name)
        stated[name] = int(match["count"])
    found_types = {"Bridge" if name.endswith("Bridge") else name for name in tree.counts}
    for name in sorted(found_types - stated.keys() - {"Misc"}):
        tree.warnings.append(f"line {last}: no line below the tree says how many {name} there are")


def _name_strange(tail: Sequence[Line], warnings: list[str]) -> None:
    """Name what does not belong below the tree: objects, a line that stands there twice or on another's end."""
    seen: set[str] = set()
    for line in tail:
        again = not line.text.startswith(" ") and line.text in seen
        if again or re.match(r"\s*[A-Z]\S* L#[0-9]+ \(", line.text) or ("Topology " in line.text[1:]):
            warnings.append(
                f"line {line.number}: does not belong below the tree, or not again: {line.text.strip()[:60]!r}"
            )
        seen.add(line.text)


def _read_matrix(tree: _Tree, tail: Sequence[Line]) -> None:
    """Look whether the latencies below the tree are those of its NUMA nodes."""
    place = next((place for place, line in enumerate(tail) if _MATRIX.fullmatch(line.text)), None)
    if place is None:
        return
    header = tail[place]
    match = _MATRIX.fullmatch(header.text)
    count = int(match["count"]) if match else 0
    body = [line for line in tail[place + 1 :] if re.match(r"\s*(index|[0-9])", line.text)]
    if count != tree.counts["NUMANode"]:
        tree.warnings.append(
            f"line {header.number}: latencies of {count} NUMA nodes, but {tree.counts['NUMANode']} are printed"
        )
    if not body or body[0].text.split() != ["index", *(str(node) for node in range(count))]:
        tree.warnings.append(f"line {header.number}: no line 'index' with {count} nodes behind it")
    rows: dict[int, Row] = {}
    for line in body[1:]:
        words = line.text.split()
        if not all(re.fullmatch("[0-9]{1,6}", word) for word in words) or int(words[0]) != len(rows):
            tree.warnings.append(
                f"line {line.number}: no row of latencies of node {len(rows)}: {line.text.strip()[:60]!r}"
            )
            continue
        rows[int(words[0])] = (line.number, tuple(int(word) for word in words[1:]))
    read_distances(range(min(count, 1024)), rows, header.number, tree.warnings)

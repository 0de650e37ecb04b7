"""Read `numactl -H` (`--hardware`): NUMA nodes, their processors, memory and distances."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.cpu_lists import cpu_list, read_cpu_list
from toolkit.topology.parsers.distances import Row, read_distances
from toolkit.topology.parsers.host_lines import Line, read_lines
from toolkit.topology.parsers.node_processors import read_node_processors

KEYS = {
    "available": "how many NUMA nodes the first line says there are",
    "node_ids": 'their numbers as that line has them ("0-3")',
    "cpus_per_node": "how many processors each node has, by its number",
    "cpu_less_nodes": "the numbers of the nodes that have memory alone",
    "nodes": "each of them by its number: cpus, its processors; size_mb, its memory in MiB",
    "distances": "a row for each node in the order of their header: its distance to each, 10 to itself",
}
_AVAILABLE = re.compile(r"available: ([0-9]{1,5}) nodes? \(([0-9,-]+)\)", re.ASCII)
_NODE_LINE = re.compile(r"node ([0-9]{1,5}) (cpus|size|free):(?: (.*))?", re.ASCII)
_MEMORY = re.compile(r"([0-9]{1,12}) MB", re.ASCII)
_HEADER = re.compile(r"node((?:\s+[0-9]{1,5})+)", re.ASCII)
_ROW = re.compile(r"\s*([0-9]{1,5}):((?:\s+\S+)*)", re.ASCII)
_NUMBERS = re.compile(r"\s*[0-9]{1,5}(?:\s+[0-9]{1,5})*", re.ASCII)
_PARTS = ("cpus", "size", "free")


@dataclass(frozen=True)
class MemoryNode:
    """One NUMA node; `cpus` is empty for a node of memory alone, None where its line is damaged."""

    cpus: tuple[int, ...] | None
    size_mib: int | None
    free_mib: int | None


@dataclass(frozen=True)
class NumaNodes:
    """`node_count` and `node_ids` are what the first line claims, `nodes` what was printed."""

    node_count: int | None
    node_ids: str | None
    nodes: Mapping[int, MemoryNode]
    distances: tuple[tuple[int | None, ...], ...] | None


def parse_numactl(text: str) -> tuple[NumaNodes, tuple[str, ...]]:
    """Read the whole output: (facts, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of numactl -H.
    """
    lines, warnings = read_lines(text)
    for line in lines:
        if "No NUMA" in line.text:
            return NumaNodes(None, None, {}, None), (*warnings, f"line {line.number}: {line.text.strip()[:80]}")
    if not any(_AVAILABLE.match(line.text) or _NODE_LINE.match(line.text) for line in lines):
        said = f": {lines[0].text[:60]!r}" if lines else ""
        raise CheckFailedError(f"nothing that numactl -H prints{said}", where=f"line {lines[0].number if lines else 1}")
    reader = _Reader(warnings)
    for line in lines:
        reader.read(line)
    return reader.facts(lines[-1].number), tuple(warnings)


class _Reader:
    """What was read so far; lines are given to it in their order."""

    def __init__(self, warnings: list[str]) -> None:
        self.warnings = warnings
        self.claims: list[tuple[int, int, str]] = []
        self.parts: dict[tuple[int, str], tuple[Line, str]] = {}
        self.header: tuple[int, tuple[int, ...]] | None = None
        self.rows: dict[int, Row] = {}
        self.title = self.no_distances = False
        self.last: tuple[int, str] | None = None

    def read(self, line: Line) -> None:
        """Take one line in."""
        text = line.text
        if match := _AVAILABLE.fullmatch(text):
            self.claims.append((line.number, int(match[1]), match[2]))
        elif match := _NODE_LINE.fullmatch(text):
            self._node_line(line, int(match[1]), match[2], match[3] or "")
            return
        elif self.last and self.last[1] == "cpus" and _NUMBERS.fullmatch(text):
            begun, value = self.parts[self.last]
            self.warnings.append(f"line {line.number}: goes on with the processors of line {begun.number}")
            self.parts[self.last] = (begun, f"{value} {text}")
            return
        elif text.strip() == "node distances:" and not self.title:
            self.title = True
        elif match := _HEADER.fullmatch(text):
            self._header_line(line, tuple(int(number) for number in match[1].split()))
        elif self.header and (match := _ROW.fullmatch(text)):
            self._row(line, int(match[1]), match[2].split())
        elif "No distance information" in text:
            self.no_distances = True
        else:
            self.warnings.append(f"line {line.number}: not a line of numactl -H: {text[:60]!r}")
        self.last = None

    def _node_line(self, line: Line, node: int, part: str, value: str) -> None:
        if (node, part) in self.parts:
            before = self.parts[node, part]
            self.warnings.append(f"line {line.number}: {part} of node {node} stand in line {before[0].number}, too")
            if before[1] != value:
                self.parts[node, part] = (line, "?")
            return
        expected = (node, _PARTS[_PARTS.index(part) - 1]) if part != "cpus" else None
        if self.last != expected and (expected or (self.last and self.last[1] != "free")):
            self.warnings.append(f"line {line.number}: {part} of node {node} do not stand where they belong")
        self.parts[node, part] = (line, value)
        self.last = (node, part)

    def _header_line(self, line: Line, nodes: tuple[int, ...]) -> None:
        if self.header or list(nodes) != sorted(set(nodes)):
            self.warnings.append(f"line {line.number}: not the header of the distances: {line.text[:60]!r}")
        if not self.title:
            self.warnings.append(f"line {line.number}: there is no line 'node distances:' before it")
        if list(nodes) == sorted(set(nodes)):
            self.header = self.header or (line.number, nodes)

    def _row(self, line: Line, node: int, cells: Sequence[str]) -> None:
        assert self.header is not None
        numbers = (
            tuple(int(cell) for cell in cells) if all(re.fullmatch("[0-9]{1,5}", cell) for cell in cells) else None
        )
        order = [row for row in self.header[1] if row not in self.rows]
        if numbers is None:
            self.warnings.append(f"line {line.number}: no row of distances: {line.text[:60]!r}")
        if node in self.rows or node not in self.header[1]:
            self.warnings.append(f"line {line.number}: a row of distances of node {node} that does not belong here")
            numbers = numbers if self.rows.get(node, (0, None))[1] == numbers else None
        elif order and order[0] != node:
            self.warnings.append(f"line {line.number}: distances of node {node} where those of {order[0]} belong")
        self.rows[node] = (line.number, numbers)

    def facts(self, last: int) -> NumaNodes:
        """What all lines say together; `last` is the number of the last of them."""
        numbers = list(dict.fromkeys(node for node, _ in self.parts))
        if numbers != sorted(numbers):
            self.warnings.append(f"line {last}: the nodes do not follow one another: {numbers}")
        cpus = read_node_processors(
            {node: self.parts[node, "cpus"] for node in numbers if (node, "cpus") in self.parts}, self.warnings
        )
        nodes = {}
        for node in sorted(numbers):
            at = next(self.parts[node, part][0].number for part in _PARTS if (node, part) in self.parts)
            missing = [part for part in _PARTS if (node, part) not in self.parts]
            if missing:
                self.warnings.append(f"line {at}: node {node} has no line {' and no line '.join(missing)}")
            size, free = self._memory(node, "size"), self._memory(node, "free")
            if size is not None and free is not None and free > size:
                self.warnings.append(f"line {at}: node {node} has more free memory than memory; neither is believed")
                size = free = None
            nodes[node] = MemoryNode(cpus.get(node), size, free)
        distances = None
        if self.header:
            distances = read_distances(self.header[1], self.rows, self.header[0], self.warnings)
        elif not self.no_distances:
            self.warnings.append(f"line {last}: there are no distances")
        self._compare(numbers, last)
        claim = self.claims[0] if len({claim[1:] for claim in self.claims}) == 1 else None
        return NumaNodes(claim and claim[1], claim and claim[2], nodes, distances)

    def _memory(self, node: int, part: str) -> int | None:
        if (node, part) not in self.parts:
            return None
        line, value = self.parts[node, part]
        match = _MEMORY.fullmatch(value)
        if not match:
            self.warnings.append(f"line {line.number}: no memory in MB: {line.text[:60]!r}")
        return int(match[1]) if match else None

    def _compare(self, numbers: list[int], last: int) -> None:
        """Name where the first line, the nodes and the distances do not speak of the same nodes."""
        if len(self.claims) != 1:
            at = self.claims[-1][0] if self.claims else 1
            self.warnings.append(f"line {at}: {len(self.claims)} lines 'available:', with which numactl -H begins once")
        for at, count, ids in self.claims:
            claimed = read_cpu_list(ids)
            if claimed is None or len(claimed) != count or set(claimed) != set(numbers):
                self.warnings.append(f"line {at}: {count} nodes ({ids}), but lines of {cpu_list(numbers) or 'none'}")
        if self.header and set(self.header[1]) != set(numbers):
            self.warnings.append(
                f"line {self.header[0]}: distances of nodes {cpu_list(self.header[1])}, but lines of {cpu_list(numbers)}"
            )


def answer_numactl(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of `KEYS` and warnings.

    Raises:
        CheckFailedError: it is no output of numactl -H.
    """
    facts, warnings = parse_numactl(text)
    cpus = {str(number): node.cpus for number, node in facts.nodes.items()}
    return {
        "available": facts.node_count,
        "node_ids": facts.node_ids,
        "cpus_per_node": {number: None if listed is None else len(listed) for number, listed in cpus.items()},
        "cpu_less_nodes": [number for number, node in facts.nodes.items() if node.cpus == ()],
        "nodes": {
            str(number): {"cpus": None if node.cpus is None else list(node.cpus), "size_mb": node.size_mib}
            for number, node in facts.nodes.items()
        },
        "distances": None if facts.distances is None else [list(row) for row in facts.distances],
    }, warnings

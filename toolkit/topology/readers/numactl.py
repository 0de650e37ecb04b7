"""Read the output of `numactl -H` (`--hardware`): NUMA nodes, their CPUs, memory and distances."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from toolkit.topology.readers.distances import Row, read_distances
from toolkit.topology.readers.lines import Line, first_damaged, read_lines, refusal
from toolkit.world.cpu_lists import LARGEST_CPU, cpu_list, read_cpu_list

KEYS = {
    "available": "number of NUMA nodes that the first line states",
    "node_ids": 'node numbers as printed in the first line ("0-3")',
    "cpus_per_node": "number of CPUs of each node, by node number",
    "cpu_less_nodes": "numbers of the nodes that have only memory; null if not all nodes of the first line are known",
    "nodes": "each node by its number: cpus, its CPU numbers; size_mb, its memory in MiB",
    "distances": "a row per node in the order of the header: the distance to each node, 10 to itself",
}
_AVAILABLE = re.compile(r"available: ([0-9]{1,5}) nodes? \(([0-9,-]+)\)", re.ASCII)
_NODE_LINE = re.compile(r"node ([0-9]{1,5}) (cpus|size|free):(?: (.*))?", re.ASCII)
_MEMORY = re.compile(r"([0-9]{1,12}) MB", re.ASCII)
_HEADER = re.compile(r"node((?:\s+[0-9]{1,5})+)", re.ASCII)
_ROW = re.compile(r"\s*([0-9]{1,5}):((?:\s+[0-9]{1,5})+)", re.ASCII)
_NUMBER = re.compile("0|[1-9][0-9]{0,5}", re.ASCII)
_PARTS = ("cpus", "size", "free")


def answer_numactl(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (values of `KEYS`, the warning that names the first damaged line) for output of numactl -H.

    Raises:
        CheckFailedError: `text` is not the output of numactl -H.
    """
    lines, warnings = read_lines(text)
    for line in lines:
        if "No NUMA" in line.text:
            facts = dict.fromkeys(KEYS) | {"cpus_per_node": {}, "nodes": {}}
            return facts, (f"line {line.number}: {line.text.strip()[:80]}",)
    if not any(_AVAILABLE.match(line.text) or _NODE_LINE.match(line.text) for line in lines):
        raise refusal("numactl -H", lines)
    reader = _Reader(warnings)
    for line in lines:
        reader.read(line)
    return reader.facts(lines[-1].number), first_damaged(warnings)


class _Reader:
    """Collects the facts while it reads the lines in order."""

    def __init__(self, warnings: list[str]) -> None:
        self.warnings = warnings
        self.claims: set[tuple[int, str]] = set()
        self.parts: dict[tuple[int, str], tuple[int, str]] = {}  # (node, key): (line, value)
        self.header: tuple[int, tuple[int, ...]] | None = None
        self.rows: dict[int, Row] = {}
        self.no_distances = False

    def read(self, line: Line) -> None:
        """Read one line."""
        text, number = line.text, line.number
        if match := _AVAILABLE.fullmatch(text):
            self.claims.add((int(match[1]), match[2]))
        elif match := _NODE_LINE.fullmatch(text):
            key = (int(match[1]), match[2])
            self.parts[key] = (number, self._agreed(self.parts.get(key, (0, match[3] or ""))[1], match[3] or "", line))
        elif (match := _HEADER.fullmatch(text)) and self.header is None:
            self.header = (number, tuple(int(node) for node in match[1].split()))
        elif self.header and (match := _ROW.fullmatch(text)):
            cells = tuple(int(cell) for cell in match[2].split())
            before = self.rows.get(int(match[1]), (0, cells))[1]
            self.rows[int(match[1])] = (number, cells if before == cells else None)
        elif "No distance information" in text:
            self.no_distances = True
        elif text.strip() != "node distances:":
            self.warnings.append(f"line {number}: expected a line of numactl -H, got {text[:60]!r}")

    def _agreed(self, before: str, value: str, line: Line) -> str:
        if before == value:
            return value
        self.warnings.append(f"line {line.number}: an earlier line has a different value: {line.text[:60]!r}")
        return "?"

    def facts(self, last: int) -> dict[str, Any]:
        """Return the values of `KEYS` from all lines; `last` is the number of the last line."""
        numbers = sorted({node for node, _ in self.parts})
        cpus = {node: self._cpus(node) for node in numbers}
        for node, other in ((a, b) for a in numbers for b in numbers if a < b):
            if set(cpus[node] or ()) & set(cpus[other] or ()):
                at = self.parts[other, "cpus"][0]
                self.warnings.append(f"line {at}: nodes {node} and {other} share CPUs")
                cpus[node] = cpus[other] = None
        sizes = {node: self._size(node) for node in numbers}
        claim = self.claims.pop() if len(self.claims) == 1 else None
        if claim is None or read_cpu_list(claim[1]) != tuple(numbers) or claim[0] != len(numbers):
            said = f"{claim[0]} nodes ({claim[1]})" if claim else "no unique line 'available:'"
            self.warnings.append(f"line 1: {said}, but lines for nodes {cpu_list(numbers)}")
        distances = None
        if self.header:
            distances = read_distances(self.header[1], self.rows, self.header[0], self.warnings)
            if list(self.header[1]) != numbers:
                self.warnings.append(f"line {self.header[0]}: distances of other nodes than {cpu_list(numbers)}")
        elif not self.no_distances:
            self.warnings.append(f"line {last}: no distances found")
        listed = {str(node): None if of is None else list(of) for node, of in cpus.items()}
        are_all_known = None not in listed.values() and claim is not None and claim[0] == len(numbers)
        return {
            "available": claim and claim[0],
            "node_ids": claim and claim[1],
            "cpus_per_node": {node: None if of is None else len(of) for node, of in listed.items()},
            "cpu_less_nodes": [node for node in numbers if not cpus[node]] if are_all_known else None,
            "nodes": {str(node): {"cpus": listed[str(node)], "size_mb": sizes[node]} for node in numbers},
            "distances": None if distances is None else [list(row) for row in distances],
        }

    def _cpus(self, node: int) -> tuple[int, ...] | None:
        if (node, "cpus") not in self.parts:
            self.warnings.append(f"line {self._line_of(node)}: no line with the CPUs of node {node}")
            return None
        number, value = self.parts[node, "cpus"]
        cpus = _ascending(value.split())
        if cpus is None:
            self.warnings.append(f"line {number}: expected ascending CPUs of node {node}, got {value[:60]!r}")
        return cpus

    def _size(self, node: int) -> int | None:
        found: list[int | None] = []
        for part in _PARTS[1:]:
            number, value = self.parts.get((node, part), (self._line_of(node), ""))
            match = _MEMORY.fullmatch(value)
            if match is None:
                self.warnings.append(f"line {number}: no {part} in MB for node {node}")
            found.append(int(match[1]) if match else None)
        size, free = found
        if size is not None and free is not None and free > size:
            self.warnings.append(f"line {self._line_of(node)}: the free memory of node {node} exceeds its size")
            return None
        return size

    def _line_of(self, node: int) -> int:
        return next(self.parts[node, part][0] for part in _PARTS if (node, part) in self.parts)


def _ascending(words: Sequence[str]) -> tuple[int, ...] | None:
    if not all(_NUMBER.fullmatch(word) for word in words):
        return None
    numbers = tuple(int(word) for word in words)
    return numbers if all(a < b for a, b in pairwise(numbers)) and max(numbers, default=0) <= LARGEST_CPU else None

"""The tables of `lscpu -e` and `lscpu -p`: a line for each processor.

A row that does not fit its header is named and not read. Rows bear each other out: processors count up, those of a core
share its socket, node and caches, and all cores have the same number of them, save where their frequencies differ.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from toolkit.topology.parsers.host_lines import Line
from toolkit.topology.parsers.lscpu_facts import Processors

_NUMBER = re.compile(r"[0-9]{1,6}|-|", re.ASCII)
_FREQUENCY = re.compile(r"[0-9]{1,5}[.,][0-9]{4}|[0-9]{1,3}%|-|", re.ASCII)
_FORMS = {
    **dict.fromkeys(("CPU", "CORE", "SOCKET", "NODE", "CLUSTER", "BOOK", "DRAWER", "ADDRESS"), _NUMBER),
    **dict.fromkeys(("ONLINE", "CONFIGURED"), re.compile(r"yes|no|Y|N|-|")),
    **dict.fromkeys(("MHZ", "SCALMHZ%", "MAXMHZ", "MINMHZ"), _FREQUENCY),
    "POLARIZATION": re.compile(r"\S*"),
    "MODELNAME": re.compile(r".*"),
}
_CACHES = re.compile(r"L[0-9][DI]?(?::L[0-9][DI]?)*|CACHE|")
_ROW = re.compile(r"[0-9]{1,6}(?:[\s,]+[0-9yn-][0-9a-z:.,%-]*)+", re.ASCII)


class _Row(NamedTuple):
    line: int
    cells: dict[str, str]

    def number(self, column: str) -> int | None:
        text = self.cells.get(column, "-")
        return int(text) if text not in ("", "-") else None


def is_table(lines: Sequence[Line]) -> bool:
    """Whether there is a header with processors, or rows that lost it."""
    return any(_header(line.text) for line in lines) or (
        len(lines) > 1 and sum(bool(_ROW.fullmatch(line.text.strip())) for line in lines) > len(lines) / 2
    )


def read_table(lines: Sequence[Line], warnings: list[str]) -> Processors:
    """The facts of a table; what does not fit is added to the warnings."""
    place = next((index for index, line in enumerate(lines) if _header(line.text)), None)
    if place is None:
        warnings.append(f"line {lines[0].number}: no header, so that no column's meaning is known")
        return Processors()
    header = _header(lines[place].text)
    assert header is not None
    number = lines[place].number
    for line in lines[:place]:
        if not line.text.startswith("#"):
            warnings.append(f"line {line.number}: not part of the table: {line.text[:60]!r}")
    for column in header:
        if column not in _FORMS and not _CACHES.fullmatch(column):
            warnings.append(f"line {number}: no column of lscpu: {column!r}")
    for column in ("NODE", "SOCKET", "CORE"):
        if header.count(column) != 1:
            warnings.append(f"line {number}: {header.count(column)} columns {column}; what it tells is unknown")
    rows = _rows(lines[place + 1 :], header, "," in lines[place].text, warnings)
    _name_gaps(rows, warnings)
    return _facts(rows, {name for name in header if header.count(name) == 1}, warnings)


def _header(text: str) -> list[str] | None:
    """The columns in capitals: `-p` writes "# CPU,Core,Socket,Node,,L1d"; None where it is no header."""
    body = text.lstrip("# ")
    columns = [name.strip().upper() for name in (body.split(",") if "," in body else body.split())]
    known = sum(name in _FORMS for name in columns)
    plausible = len(columns) <= 2 * known + 2 and not any(name.endswith(":") for name in columns)
    return columns if "CPU" in columns and plausible and (known >= 2 or len(columns) == 1) else None


def _rows(lines: Sequence[Line], header: list[str], commas: bool, warnings: list[str]) -> list[_Row]:
    rows: dict[int, _Row] = {}
    for line in lines:
        if line.text.startswith("#"):
            continue
        cells = [cell.strip() for cell in line.text.split(",")] if commas else _split(line.text, header)
        if len(cells) != len(header):
            warnings.append(
                f"line {line.number}: {len(cells)} cells under {len(header)} columns; nothing is read from it"
            )
            continue
        row = _Row(line.number, dict(zip(header, cells, strict=True)))
        wrong = next((name for name, cell in row.cells.items() if not _fits(name, cell)), None)
        cpu = None if wrong else row.number("CPU")
        if cpu is None:
            warnings.append(
                f"line {line.number}: a cell that does not fit its column {wrong or 'CPU'}; nothing is read from it"
            )
        elif cpu in rows:
            warnings.append(f"line {line.number}: processor {cpu} stands in line {rows[cpu].line}, too")
            if rows[cpu].cells != row.cells:
                rows[cpu] = _Row(rows[cpu].line, {"CPU": str(cpu)})
        else:
            rows[cpu] = row
    return list(rows.values())


def _split(text: str, header: list[str]) -> list[str]:
    if "MODELNAME" not in header:
        return text.split()
    before, after = header.index("MODELNAME"), len(header) - header.index("MODELNAME") - 1
    cells = text.split()
    return [*cells[:before], " ".join(cells[before : len(cells) - after]), *cells[len(cells) - after :]]


def _fits(column: str, cell: str) -> bool:
    if column in _FORMS:
        return bool(_FORMS[column].fullmatch(cell))
    parts = cell.split(":")
    return len(parts) == column.count(":") + 1 and all(_NUMBER.fullmatch(part) for part in parts)


def _name_gaps(rows: list[_Row], warnings: list[str]) -> None:
    """Processors that are not printed: `-p` leaves those out that are offline, but a line may be lost as well."""
    before = -1
    for row in rows:
        cpu = row.number("CPU")
        if cpu is not None and cpu != before + 1:
            warnings.append(
                f"line {row.line}: processor {cpu} stands behind {before}: lines are lost, or some are offline"
            )
        before = before if cpu is None else cpu
    frequencies: dict[tuple[int | None, int | None], set[str]] = defaultdict(set)
    for row in rows:
        frequencies[row.number("SOCKET"), row.number("CORE")].add(
            row.cells.get("MAXMHZ", "") + row.cells.get("MINMHZ", "")
        )
    shapes = {len(row.cells) - list(row.cells.values()).count("-") for row in rows if row.cells.get("ONLINE") != "no"}
    if len(shapes) > 1:
        warnings.append(f"line {rows[-1].line}: rows differ in which of their cells are known")


def _facts(rows: list[_Row], columns: set[str], warnings: list[str]) -> Processors:
    by_core, by_node, nodes_of_socket = defaultdict(list), defaultdict(list), defaultdict(set)
    for row in rows:
        if (core := row.number("CORE")) is not None:
            by_core[core].append(row)
        if (node := row.number("NODE")) is not None:
            by_node[node].append(row.number("CPU"))
            nodes_of_socket[node].add(row.number("SOCKET"))
    doubtful = {name for name in ("NODE", "SOCKET", "CORE") if name not in columns}
    if not _cores_agree(by_core, warnings):
        doubtful |= {"NODE", "SOCKET", "CORE"}
    for node, sockets in nodes_of_socket.items():
        if len(sockets) > 1 and len(nodes_of_socket) > 1:
            warnings.append(f"line {rows[0].line}: NUMA node {node} has processors of {len(sockets)} sockets")
    sizes = {len(cpus) for cpus in by_node.values()}
    if len(sizes) > 1:
        warnings.append(f"line {rows[-1].line}: NUMA nodes differ in their number of processors: {sorted(sizes)}")
    per_core = {len(members) for members in by_core.values()}
    nodes = {
        node: tuple(cpu for cpu in sorted(c for c in cpus if c is not None)) for node, cpus in sorted(by_node.items())
    }
    known_nodes = nodes if nodes and "NODE" not in doubtful else None
    return Processors(
        cpus=len(rows) or None,
        sockets=_distinct(rows, "SOCKET") if "SOCKET" not in doubtful else None,
        cores=len(by_core) if by_core and "CORE" not in doubtful else None,
        threads_per_core=max(per_core) if per_core and "CORE" not in doubtful else None,
        numa_nodes=None if known_nodes is None else len(known_nodes),
        node_cpus=known_nodes,
    )


def _distinct(rows: list[_Row], column: str) -> int | None:
    return len({row.number(column) for row in rows} - {None}) or None


def _cores_agree(by_core: dict[int, list[_Row]], warnings: list[str]) -> bool:
    """Whether all processors of a core name the same socket, node and caches; the numbers of cores are unique."""
    agree = True
    most = max((len(members) for members in by_core.values()), default=0)
    for core, members in by_core.items():
        shared = {
            tuple(v for k, v in row.cells.items() if k not in ("CPU", "MHZ", "SCALMHZ%", "ADDRESS"))
            for row in members
            if len(row.cells) > 1
        }
        if len(shared) > 1:
            warnings.append(f"line {members[-1].line}: processors of core {core} differ in socket, node or caches")
            agree = False
        if len(members) != most:
            warnings.append(
                f"line {members[-1].line}: core {core} has {len(members)} processors, others {most}: cores differ, or lines are lost"
            )
    return agree

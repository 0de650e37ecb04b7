"""Read `rocm-smi --showtopo`: links between AMD GPUs, and the NUMA node of each.

It prints tables of weights, hops, link types and access, one under the other, and lines for NUMA. Each of them is there
alone, too, behind a flag of its own (`--showtoponuma`, ...).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.lines import Line, lines_of

_UNKNOWN = "null where the link of a pair is not known, or none is printed"
KEYS = {
    "gpu_count": "how many GPUs are printed",
    "link_summary": f'the link types between them: "all XGMI", "16x PCIE, 12x XGMI"; {_UNKNOWN}',
    "numa": "the NUMA node of each GPU, -1 where the driver knows none; null where none is printed",
    "one_xgmi_clique": f"whether every pair has XGMI; {_UNKNOWN}",
}
_TITLES = {
    "Weight between two GPUs": re.compile(r"[0-9]+|N/A"),
    "Hops between two GPUs": re.compile(r"[0-9]+|N/A"),
    "Link Type between two GPUs": re.compile(r"0|XGMI|PCIE|XXXX|N/A|[A-Z]{2,12}"),
    "Link accessibility between two GPUs": re.compile(r"True|False|N/A"),
}
_TYPES = "Link Type between two GPUs"
_NUMA_TITLE = "Numa Nodes"
_BEGIN = "ROCm System Management Interface"
_END = "End of ROCm SMI Log"
_RULED = re.compile(r"=++ *+([^= ](?:[^=]*[^= ])?) *=++")
_HEADER = re.compile(r"GPU[0-9]{1,4}(?:\s+GPU[0-9]{1,4})*")
_ROW = re.compile(r"(GPU[0-9]{1,4})((?:\s+\S+)+)")
_NUMA = re.compile(r"GPU ?\[?([0-9]{1,4})\]?\s*: \(Topology\) Numa (Node|Affinity): (-?[0-9]{1,6})")
_NO_DEVICES = re.compile(
    r"(?:WARNING: )?No (?:AMD GPUs specified|(?:DRM )?devices? (?:were )?(?:found|available))\.?", re.IGNORECASE
)
_TALK = re.compile(r"(?:WARNING|ERROR|Exception|Warning): ?|\*+$|Cannot |Unable to |Not supported", re.IGNORECASE)


@dataclass(frozen=True)
class RocmTopology:
    """`links[i, j]` is the type ("XGMI", "PCIE") between the GPUs numbered i and j, i < j, None where the text does not
    tell, and all of it None where no types are printed. `numa_nodes` likewise, by the GPU's number."""

    gpus: tuple[int, ...]
    links: dict[tuple[int, int], str | None] | None
    numa_nodes: dict[int, int | None] | None


@dataclass
class _Table:
    title: str
    line: int
    columns: list[str] = field(default_factory=list)
    rows: dict[str, tuple[int, list[str] | None]] = field(default_factory=dict)


def parse_rocm_smi_topo(text: str) -> tuple[RocmTopology, tuple[str, ...]]:
    """Read the whole output: (GPUs and their links, warnings that name the damaged lines).

    Raises:
        CheckFailedError: no line of it is one of this command.
    """
    lines, warnings = lines_of(text)
    said = list(warnings)
    tables: list[_Table] = []
    numa: dict[tuple[int, str], tuple[int, int | None]] = {}
    titles: dict[str, int] = {}
    others: list[Line] = []
    empty = False
    for line in lines:
        words = line.text.strip()
        if ruled := _RULED.fullmatch(words):
            _add_title(ruled[1], line.number, titles, tables, said)
        elif match := _NUMA.fullmatch(words):
            value = None if warnings and line is lines[-1] else int(match[3])
            _add_numa(int(match[1]), match[2], line.number, value, numa, said)
        elif _HEADER.fullmatch(words) and tables and not tables[-1].columns:
            tables[-1].columns = words.split()
        elif (match := _ROW.fullmatch(words)) and tables and not _HEADER.fullmatch(words):
            _add_row(tables[-1], line.number, match[1], match[2].split(), said)
        elif words:
            empty = empty or bool(_NO_DEVICES.fullmatch(words))
            others.append(line)
    if not (empty or tables or numa or _BEGIN in titles or _END in titles):
        shown = others[0] if others else Line(1, "")
        raise CheckFailedError(f"no table of rocm-smi's: {shown.text.strip()[:60]!r}", where=f"line {shown.number}")
    said += [
        f"line {line.number}: no part of a table: {line.text.strip()[:60]!r}"
        for line in others
        if not _TALK.match(line.text.strip()) and not _NO_DEVICES.fullmatch(line.text.strip())
    ]
    _check_ends(titles, len(lines), said)
    for table in tables:
        _check_table(table, said)
    order = [list(_TITLES).index(table.title) for table in tables if not table.title.startswith("Link acc")]
    if sorted(order) != order:
        said.append(f"line {tables[0].line}: the tables do not stand in this command's order")
    return _topology(tables, numa, titles, said), tuple(said)


def answer_rocm_smi_topo(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output: (values of `KEYS`, warnings that name the damaged lines).

    Raises:
        CheckFailedError: no line of it is one of this command.
    """
    topology, warnings = parse_rocm_smi_topo(text)
    links = None if topology.links is None else list(topology.links.values())
    known = links is not None and None not in links
    counts = sorted(Counter(link for link in links or () if link).items())
    many = "single GPU, no pairs" if len(topology.gpus) == 1 else "no GPU"
    summary = f"all {counts[0][0]}" if len(counts) == 1 else ", ".join(f"{count}x {link}" for link, count in counts)
    numa = topology.numa_nodes
    return {
        "gpu_count": len(topology.gpus),
        "link_summary": (summary or many) if known else None,
        "numa": None if numa is None else [numa[gpu] for gpu in topology.gpus],
        "one_xgmi_clique": bool(links) and set(links or ()) == {"XGMI"} if known else None,
    }, warnings


def _add_title(title: str, number: int, titles: dict[str, int], tables: list[_Table], said: list[str]) -> None:
    if title in titles:
        said.append(f"line {number}: {title!r} a second time, also in line {titles[title]}")
    elif _END in titles:
        said.append(f"line {number}: {title!r} behind the end of the log")
    titles.setdefault(title, number)
    if title in _TITLES:
        tables.append(_Table(title, number))
    elif title not in (_BEGIN, _END, _NUMA_TITLE):
        said.append(f"line {number}: {title[:60]!r} is no title of this command")


def _add_row(table: _Table, number: int, name: str, cells: list[str], said: list[str]) -> None:
    if name in table.rows:
        said.append(f"line {number}: a second row {name}, ignored")
        return
    problem = ""
    own = table.columns.index(name) if table.columns.count(name) == 1 else None
    if len(cells) != len(table.columns):
        problem = f"{len(cells)} cells for {len(table.columns)} columns"
    elif not all(_TITLES[table.title].fullmatch(cell) for cell in cells):
        problem = f"cells that do not belong under {table.title!r}"
    elif own is None:
        problem = "no column of that name"
    elif table.title != "Link accessibility between two GPUs" and cells[own] not in ("0", "N/A"):
        problem = f"{cells[own]!r} to itself"
    elif "0" in (cell for place, cell in enumerate(cells) if place != own):
        problem = "0 to another GPU"
    if problem:
        said.append(f"line {number}: row {name}: {problem}, row ignored")
    table.rows[name] = (number, None if problem else cells)


def _add_numa(
    gpu: int,
    what: str,
    number: int,
    value: int | None,
    numa: dict[tuple[int, str], tuple[int, int | None]],
    said: list[str],
) -> None:
    if (gpu, what) in numa:
        said.append(f"line {number}: Numa {what} of GPU {gpu} a second time, also in line {numa[gpu, what][0]}")
        if numa[gpu, what][1] != value:
            numa[gpu, what] = (number, None)
        return
    if numa and (gpu, what) not in _next_of(next(reversed(numa))):
        said.append(f"line {number}: Numa {what} of GPU {gpu} out of order")
    numa[gpu, what] = (number, value)


def _next_of(last: tuple[int, str]) -> tuple[tuple[int, str], ...]:
    gpu, what = last
    return ((gpu, "Affinity"), (gpu + 1, "Node")) if what == "Node" else ((gpu + 1, "Node"), (gpu + 1, "Affinity"))


def _check_ends(titles: dict[str, int], count: int, said: list[str]) -> None:
    if _BEGIN not in titles:
        said.append(f"line 1: the line {_BEGIN!r} is not there")
    if _END not in titles:
        said.append(f"line {max(count, 1)}: the line {_END!r} is not there, so that the text may be cut")


def _check_table(table: _Table, said: list[str]) -> None:
    """As many rows as columns, in one order, and the same both ways."""
    if not table.columns:
        said.append(f"line {table.line}: {table.title!r} has no header")
    elif table.columns != [f"GPU{number}" for number in range(len(table.columns))]:
        said.append(f"line {table.line + 1}: the columns are {', '.join(table.columns)[:80]}, not GPU0 and so on")
    if table.columns != list(table.rows):
        said.append(
            f"line {table.line}: {table.title!r}: the rows are {', '.join(table.rows)[:80]}, unlike its columns"
        )
    for i, one in enumerate(table.columns):
        for j, other in enumerate(table.columns[:i]):
            number, cells = table.rows.get(one, (0, None))
            _, back = table.rows.get(other, (0, None))
            if cells and back and cells[j] != back[i]:
                said.append(f"line {number}: {one} to {other} reads {cells[j]}, the other way {back[i]}: both ignored")
                cells[j] = back[i] = "?"


def _topology(
    tables: list[_Table], numa: dict[tuple[int, str], tuple[int, int | None]], titles: dict[str, int], said: list[str]
) -> RocmTopology:
    named = {int(name[3:]) for table in tables for name in (*table.columns, *table.rows)}
    gpus = tuple(sorted(named | {gpu for gpu, _ in numa}))
    sizes = {len(table.columns) for table in tables}
    if len(sizes) > 1:
        said.append(f"line {tables[-1].line}: the tables have different columns")
    if (numa or _NUMA_TITLE in titles) and {(gpu, what) for gpu in gpus for what in ("Node", "Affinity")} != set(numa):
        said.append(f"line {titles.get(_NUMA_TITLE, 1)}: not every GPU has its NUMA node and affinity")
    if numa and _NUMA_TITLE not in titles:
        said.append(f"line {min(line for line, _ in numa.values())}: lines of NUMA without their title")
    if gpus != tuple(range(len(gpus))):
        said.append(f"line 1: GPUs are numbered {gpus}, not from 0 on")
    nodes = {gpu: numa.get((gpu, "Node"), (0, None))[1] for gpu in gpus} if numa or _NUMA_TITLE in titles else None
    types = next((table for table in tables if table.title == _TYPES), None)
    links = None if types is None else {(i, j): _link(types, i, j) for j in gpus for i in gpus if i < j}
    return RocmTopology(gpus, links, nodes)


def _link(table: _Table, one: int, other: int) -> str | None:
    for row, column in ((one, other), (other, one)):
        cells = table.rows.get(f"GPU{row}", (0, None))[1]
        if cells is not None and f"GPU{column}" in table.columns:
            cell = cells[table.columns.index(f"GPU{column}")]
            return None if cell in ("?", "N/A", "0") else cell
    return None

"""Read `nvidia-smi topo -m`: links between GPUs, links from GPUs to NICs, CPU and NUMA affinity.

A row that does not fit the header is repaired only when there is one way to read it, otherwise its cells are unknown.
Every link between two devices is printed twice; where the two differ neither counts. Each is reported with its line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.lines import Line, lines_of
from toolkit.topology.parsers.topo_cells import (
    CELL,
    GPU,
    NIC,
    TITLES,
    Row,
    is_header,
    numbers_of,
    read_header,
    read_row,
)
from toolkit.topology.parsers.topo_legend import read_legend

_NO_DEVICES = re.compile(r"No devices were found\.?", re.IGNORECASE)


@dataclass(frozen=True)
class LinkMatrix:
    """Links as nvidia-smi names them: "NV12", "PIX", "PXB", "PHB", "NODE", "SYS" (older drivers: "SOC").

    `gpu_links[i][j]` is the link from `gpus[i]` to `gpus[j]` ("X" to itself), `nic_links[i][j]` that from
    `gpus[i]` to `nics[j]`; None where the text does not tell. `nic_devices[j]` is the device of `nics[j]` by the
    legend, None without a legend. Affinities are the printed lists ("0-19,40-59", "N/A"), None where the driver
    prints no such column; they are lists even where one number is usual.
    """

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    nic_devices: tuple[str | None, ...]
    gpu_links: tuple[tuple[str | None, ...], ...]
    nic_links: tuple[tuple[str | None, ...], ...]
    cpu_affinity: tuple[str | None, ...]
    numa_affinity: tuple[str | None, ...]
    gpu_numa_id: tuple[str | None, ...]


def parse_nvidia_smi_topo(text: str) -> tuple[LinkMatrix, tuple[str, ...]]:
    """Read the whole output: (matrix, warnings that name the damaged lines).

    Raises:
        CheckFailedError: no line of it is the header, or a row, of a matrix.
    """
    lines, warnings = lines_of(text)
    start = next((place for place, line in enumerate(lines) if is_header(line.text)), None)
    if start is None:
        if any(_NO_DEVICES.fullmatch(line.text.strip()) for line in lines):
            return LinkMatrix((), (), (), (), (), (), (), ()), warnings
        shown = next((line for line in lines if line.text.strip()), Line(1, ""))
        raise CheckFailedError(f"no header with GPU columns: {shown.text.strip()[:60]!r}", where=f"line {shown.number}")
    said = list(warnings)
    header, problems = read_header(lines[start].text)
    said += [f"line {start + 1}: header: {problem}" for problem in problems]
    said += [f"line {line.number}: a row before the header, ignored" for line in lines[:start] if _is_row(line.text)]

    rows: dict[str, Row | None] = {}
    below: list[Line] = []
    for line in lines[start + 1 :]:
        if is_header(line.text):
            said.append(f"line {line.number}: a second matrix, not read")
            break
        if not _is_row(line.text):
            below.append(line)
            continue
        name = line.text.split()[0]
        if any(other.text.strip() for other in below):
            said.append(f"line {line.number}: a row below the legend")
        row, problems = read_row(line.number, line.text, header, cut=bool(warnings) and line is lines[-1])
        said += [f"line {line.number}: row {name}: {problem}" for problem in problems]
        if name in rows:
            said.append(f"line {line.number}: a second row {name}, ignored")
        else:
            rows[name] = row
    return _matrix(header.columns, rows, below, start + 1, said, cut=bool(warnings)), tuple(said)


def _is_row(text: str) -> bool:
    """It begins with a device, or its second word, and others, are links."""
    name, *cells = text.split() or [""]
    if re.fullmatch(r"(?:GPU|NIC)[0-9]+", name):
        return True
    return (
        bool(cells) and cells[0] != "=" and sum(bool(re.fullmatch(f"{CELL}+", cell)) for cell in cells) * 2 > len(cells)
    )


def _matrix(
    columns: tuple[str | None, ...],
    rows: dict[str, Row | None],
    below: list[Line],
    header_line: int,
    said: list[str],
    *,
    cut: bool,
) -> LinkMatrix:
    """Put header, rows and legend together; what they hold against each other is said."""
    names = [name for name in columns if name is not None]
    gpus = [*filter(GPU.fullmatch, names), *(name for name in rows if GPU.fullmatch(name) and name not in names)]
    # A name that is no NIC<n> may be a damaged word; a row of its own proves that it is a device.
    nics = [name for name in names if name not in gpus and (NIC.fullmatch(name) or name in rows)]
    said += [f"line {header_line}: no row for {name}" for name in names if name not in rows]
    said += [f"line {header_line}: no column for row {name}" for name in rows if name not in names]
    order = [name for name in rows if name in names]
    if order != [name for name in names if name in rows]:
        said.append(f"line {header_line}: rows do not follow in the order of the columns: {', '.join(order)}")
    read = {name: row for name, row in rows.items() if row is not None}
    links = _links(columns, read, said)
    affinities = {title: tuple(_affinity(read.get(gpu), title) for gpu in gpus) for title in TITLES}
    for title in TITLES[:2]:
        _warn_of_overlap(title, [read[gpu] for gpu in gpus if gpu in read], said)
    _warn_of_unlike_nodes([read[gpu] for gpu in gpus if gpu in read], said)
    used = {link for row in read.values() for link in row.links}
    devices, others, problems = read_legend(below, nics, used, cut=cut)
    said += [f"line {line.number}: no row and no legend: {line.text.strip()[:60]!r}" for line in others]
    said += problems
    return LinkMatrix(
        gpus=tuple(gpus),
        nics=tuple(nics),
        nic_devices=tuple(devices.get(nic) for nic in nics),
        gpu_links=tuple(tuple(links.get((one, other)) for other in gpus) for one in gpus),
        nic_links=tuple(tuple(links.get((gpu, nic)) for nic in nics) for gpu in gpus),
        cpu_affinity=affinities["CPUAffinity"],
        numa_affinity=affinities["NUMAAffinity"],
        gpu_numa_id=affinities["GPUNUMAID"],
    )


def _links(columns: tuple[str | None, ...], rows: dict[str, Row], said: list[str]) -> dict[tuple[str, str], str | None]:
    """Links by (row, column), without those that the mirrored cell speaks against."""
    links: dict[tuple[str, str], str | None] = {
        (name, other): link
        for name, row in rows.items()
        for other, link in zip(columns, row.links, strict=True)
        if other is not None
    }
    for (one, other), link in list(links.items()):
        back = links.get((other, one))
        if link is not None and back is not None and link != back:
            where = f"line {rows[one].number}: {one} to {other} reads {link}"
            said.append(f"{where}, {other} to {one} in line {rows[other].number} reads {back}: both ignored")
            links[one, other] = links[other, one] = None
    return links


def _affinity(row: Row | None, title: str) -> str | None:
    return None if row is None else row.affinities.get(title)


def _warn_of_overlap(title: str, rows: list[Row], said: list[str]) -> None:
    """GPUs that are near to some of the same CPUs are near to all of them; a lost digit breaks that."""
    sets: dict[str, tuple[int, set[int]]] = {}
    for row in rows:
        text = row.affinities.get(title, "N/A")
        if text == "N/A" or text in sets:
            continue
        numbers = numbers_of(text)
        for other, (line, taken) in sets.items():
            if taken & numbers:
                said.append(f"line {row.number}: {title} {text} overlaps {other} of line {line}: one may be damaged")
        sets[text] = (row.number, numbers)


def _warn_of_unlike_nodes(rows: list[Row], said: list[str]) -> None:
    """GPUs that are near to the same CPUs do not differ in whether their NUMA node is known."""
    nodes: dict[str, tuple[int, str]] = {}
    for row in rows:
        cpus, node = (row.affinities.get(title, "N/A") for title in TITLES[:2])
        line, other = nodes.setdefault(cpus, (row.number, node))
        if (node == "N/A") != (other == "N/A"):
            said.append(
                f"line {row.number}: {cpus} with NUMA node {node}, in line {line} with {other}: one may be damaged"
            )

"""Read the output of `nvidia-smi topo -m`: links between GPUs and to NICs, CPU and NUMA affinity.

`nvidia-smi topo -mp` prints the same matrix without NVLinks, so the links between GPUs are then unknown.
toolkit identifies cells by their content and never by their position, because rows are often not aligned with the
header. If the cells of a row do not match the header, toolkit ignores its links. Every link is printed twice, so the row
of the other device still contains it. If the two cells differ, the link is unknown.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from toolkit.errors import CheckFailedError
from toolkit.topology.readers.lines import Line, first_damaged, lines_of, refusal

_TITLE = re.compile(r"(?:NIC )?Legend:")
_WORD = re.compile(r"(?:X|SYS|SOC|NODE|PHB|PXB|PIX|NV#)\s*= [^=]*")
_NIC = re.compile(r"(NIC[0-9]{1,4}):\s+([\w.-]+)", re.ASCII)


def read_legend(lines: Sequence[Line], nics: Collection[str], warnings: list[str]) -> dict[str, str]:
    """Return the device of each NIC in `nics` from the NIC legend; add a warning for each damaged line."""
    devices: dict[str, str] = {}
    contested: set[str] = set()
    for line in lines:
        text = line.text.strip()
        if match := _NIC.fullmatch(text):
            others = {nic for nic, device in devices.items() if (nic == match[1]) != (device == match[2])}
            if others or match[1] not in nics:
                warnings.append(f"line {line.number}: {match[1]} or {match[2]} has another meaning in an earlier line")
                contested |= {*others, match[1]}
            devices[match[1]] = match[2]
        elif text and not _TITLE.fullmatch(text) and not _WORD.fullmatch(text):
            warnings.append(f"line {line.number}: expected a row or a legend, got {text[:60]!r}")
    missing = [nic for nic in nics if nic not in devices]
    if missing:
        at = lines[-1].number if lines else 1
        warnings.append(f"line {at}: the NIC legend lacks {', '.join(missing)}")
    return {nic: device for nic, device in devices.items() if nic not in contested}


_CELL = re.compile(r"X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|SOC")
_CELLS = re.compile(f"(?:{_CELL.pattern})+")
_GPU = re.compile(r"GPU[0-9]{1,4}")
_NUMBERED = re.compile(r"(GPU|NIC)([0-9]{1,4})")
_DEVICE = re.compile(r"(?:GPU|NIC)[0-9]{1,4}|[a-z][A-Za-z0-9_.-]{1,31}")  # old drivers print device names of NICs
_TITLES = ("CPUAffinity", "NUMAAffinity", "GPUNUMAID")
_TITLES_OF_A_DRIVER = tuple(_TITLES[:count] for count in range(len(_TITLES), 0, -1))
_RUN = re.compile(r"(?:0|[1-9][0-9]{0,4})(?:-[1-9][0-9]{0,4})?")
# An underlined header of which a web form or `cat -v` has changed the escape character.
_LOST_ESCAPE = re.compile(r"(?:\x1b|\^\[|\\(?:033|x1b|e)|␛)?\[[0-9;]{0,5}m")
_PCIE_COMMAND = re.compile(r"\btopo\b.* (?:-mp|--matrix_pci)\b")
_NO_DEVICES = re.compile(r"No devices were found\.?", re.IGNORECASE)


@dataclass(frozen=True)
class LinkMatrix:
    """Links as nvidia-smi names them: "NV12", "PIX", "PXB", "PHB", "NODE", "SYS" (older drivers: "SOC").

    `gpu_links[i][j]` is the link from `gpus[i]` to `gpus[j]` ("X" to itself), `nic_links[i][j]` the link from `gpus[i]`
    to `nics[j]`; None if unknown. `nic_devices[j]` is the device of `nics[j]` in the legend, None without a legend.
    Affinities are lists as printed ("0-19,40-59", "N/A"), None if they are unknown or the driver prints no such column.
    """

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    nic_devices: tuple[str | None, ...]
    gpu_links: tuple[tuple[str | None, ...], ...]
    nic_links: tuple[tuple[str | None, ...], ...]
    cpu_affinity: tuple[str | None, ...]
    numa_affinity: tuple[str | None, ...]
    gpu_numa_id: tuple[str | None, ...]


@dataclass(frozen=True)
class _Row:
    """The links of one row in column order, None if they do not match the header, and its affinities by title."""

    links: tuple[str, ...] | None
    affinities: Mapping[str, str]


def parse_nvidia_smi_topo(text: str) -> tuple[LinkMatrix, tuple[str, ...]]:
    """Return (matrix, the warning that names the first damaged line) for output of `nvidia-smi topo -m`.

    Raises:
        CheckFailedError: the header is missing or damaged, so the meaning of the columns is unknown.
    """
    lines, warnings = lines_of(_LOST_ESCAPE.sub("", text))
    said = list(warnings)
    lines = lines[:-1] if warnings else lines  # the last line may be truncated
    start = next((place for place, line in enumerate(lines) if _is_header(line.text)), None)
    if start is None:
        if any(_NO_DEVICES.fullmatch(line.text.strip()) for line in lines):
            return LinkMatrix((), (), (), (), (), (), (), ()), first_damaged(said)
        raise refusal("nvidia-smi topo -m", [line for line in lines if line.text.strip()])
    names, titles = _read_header(lines[start], said)
    rows: dict[str, _Row] = {}
    below: list[Line] = []
    for line in lines[start + 1 :]:
        tokens = line.text.split()
        if _is_header(line.text):
            said.append(f"line {line.number}: a second matrix, which is ignored")
            break
        if tokens and tokens[0] in names:
            row = _read_row(line, names, titles, said)
            if rows.setdefault(tokens[0], row) != row:
                said.append(f"line {line.number}: a second row {tokens[0]} with different cells")
                rows[tokens[0]] = _Row(None, {})
        elif len(tokens) > 1 and _DEVICE.fullmatch(tokens[0]) and _CELL.fullmatch(tokens[1]):
            raise CheckFailedError(f"the header lacks {tokens[0]}", where=f"line {line.number}")
        else:
            below.append(line)
    said += [f"line {lines[start].number}: no row for {name}" for name in names if name not in rows]
    matrix = _matrix(names, rows, below, said)
    if len(matrix.gpus) > 1 and _is_pcie_only(matrix, lines[:start], below):
        said.append(f"line {lines[start].number}: this is topo -mp, which shows no NVLinks; use topo -m")
        matrix = replace(
            matrix, gpu_links=tuple(tuple(link if link == "X" else None for link in row) for row in matrix.gpu_links)
        )
    return matrix, first_damaged(said)


def _is_pcie_only(matrix: LinkMatrix, above: Sequence[Line], below: Sequence[Line]) -> bool:
    """Return whether the matrix is that of `topo -mp`, whose legend does not explain NV#. Some drivers print no legend."""
    if any((link or "").startswith("NV") for row in matrix.gpu_links for link in row):
        return False
    legend = [line.text.strip() for line in below]
    has_legend = "Legend:" in legend
    is_named = any(_PCIE_COMMAND.search(line.text) for line in above)
    return is_named or (has_legend and not any(line.startswith("NV#") for line in legend))


def _is_header(text: str) -> bool:
    """Return whether a line names GPUs and contains no link."""
    tokens = text.split()
    has_link = any(_CELLS.fullmatch(token) for token in tokens[1:])
    return not has_link and any(_GPU.match(t) for t in tokens) and (len(tokens) > 1 or bool(_GPU.fullmatch(tokens[0])))


def _read_header(line: Line, said: list[str]) -> tuple[list[str], tuple[str, ...] | None]:
    """Return (the devices of the columns, the titles after them, or None if these are damaged)."""
    tokens = line.text.split()
    names = list(takewhile(_DEVICE.fullmatch, tokens))
    titles = next((one for one in _TITLES_OF_A_DRIVER if "".join(tokens[len(names) :]) == "".join(one)), None)
    if titles is None:
        said.append(f"line {line.number}: expected CPU Affinity after the devices, got {tokens[len(names) :]}")
    numbers: dict[str, list[int]] = {"GPU": [], "NIC": []}
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        numbers[match[1]].append(int(match[2]))
    is_counted = all(found == list(range(len(found))) for found in numbers.values())
    has_gpus_first = all(_GPU.fullmatch(name) for name in names[: len(numbers["GPU"])])
    rest = [token for token in tokens[len(names) :] if ("GPU" in token and token != "GPU") or "NIC" in token]
    if not names or not is_counted or not has_gpus_first or len(set(names)) < len(names) or rest:
        raise CheckFailedError(f"expected a header, got {line.text.strip()[:60]!r}", where=f"line {line.number}")
    return names, titles


def _read_row(line: Line, names: Sequence[str], titles: tuple[str, ...] | None, said: list[str]) -> _Row:
    name, *tokens = line.text.split()
    cells = list(takewhile(_CELLS.fullmatch, tokens))
    own = [place for place, cell in enumerate(cells) if cell == "X"]
    fits = len(cells) == len(names) and own == [names.index(name)] and all(map(_CELL.fullmatch, cells))
    if not fits:
        said.append(f"line {line.number}: row {name}: {len(cells)} link cells do not match {len(names)} columns")
    tail = tokens[len(cells) :]
    if not _GPU.fullmatch(name):
        if tail:
            said.append(f"line {line.number}: row {name}: expected only links, since it is not a GPU, got also {tail}")
        return _Row(tuple(cells) if fits else None, {})
    affinities = _affinities(tail, titles or ())
    if titles and not affinities:
        said.append(f"line {line.number}: row {name}: expected {len(titles)} affinities, got {tail}")
    return _Row(tuple(cells) if fits else None, affinities)


def _affinities(cells: Sequence[str], titles: Sequence[str]) -> dict[str, str]:
    """Return the cells after the links by column title; {} if a cell does not match its column."""
    if len(cells) != len(titles) or not all(_is_list(cell) for cell in cells):
        return {}
    by_title = dict(zip(titles, cells, strict=True))
    cpus, nodes, own = (by_title.get(title, "N/A") for title in _TITLES)
    # NUMA nodes near a GPU have at least one CPU each, and the memory of a GPU is a single NUMA node.
    if nodes != "N/A" and (cpus == "N/A" or _count(cpus) < _count(nodes)):
        return {}
    return {} if own != "N/A" and (nodes == "N/A" or not own.isdigit()) else by_title


def _is_list(cell: str) -> bool:
    """Return whether a cell is an ascending list such as "0-19,40-59", or "N/A"."""
    if cell == "N/A":
        return True
    runs = cell.split(",")
    if len(cell) > 4000 or not all(_RUN.fullmatch(run) for run in runs):
        return False
    numbers = [int(number) for run in runs for number in run.split("-")]
    return numbers == sorted(set(numbers))


def _count(cell: str) -> int:
    """Return how many numbers a list such as "0-19,40-59" contains."""
    runs = [[int(number) for number in run.split("-")] for run in cell.split(",")]
    return sum(run[-1] - run[0] + 1 for run in runs)


def _matrix(names: Sequence[str], rows: Mapping[str, _Row], below: Sequence[Line], said: list[str]) -> LinkMatrix:
    gpus = [name for name in names if _GPU.fullmatch(name)]
    nics = [name for name in names if not _GPU.fullmatch(name)]
    printed = {(name, other): link for name, row in rows.items() for other, link in zip(names, row.links or ())}  # noqa: B905
    for (one, other), link in printed.items():
        if names.index(one) < names.index(other) and printed.get((other, one), link) != link:
            back = printed[other, one]
            said.append(f"line 1: {one} to {other} is {link}, but {other} to {one} is {back}; both are ignored")

    def link_of(one: str, other: str) -> str | None:
        found = {printed[pair] for pair in ((one, other), (other, one)) if pair in printed}
        return found.pop() if len(found) == 1 else None

    def affinity(title: str) -> tuple[str | None, ...]:
        return tuple(rows[gpu].affinities.get(title) if gpu in rows else None for gpu in gpus)

    devices = read_legend(below, [nic for nic in nics if _NUMBERED.fullmatch(nic)], said)
    return LinkMatrix(
        gpus=tuple(gpus),
        nics=tuple(nics),
        nic_devices=tuple(devices.get(nic) for nic in nics),
        gpu_links=tuple(tuple(link_of(gpu, other) for other in gpus) for gpu in gpus),
        nic_links=tuple(tuple(link_of(gpu, nic) for nic in nics) for gpu in gpus),
        cpu_affinity=affinity("CPUAffinity"),
        numa_affinity=affinity("NUMAAffinity"),
        gpu_numa_id=affinity("GPUNUMAID"),
    )

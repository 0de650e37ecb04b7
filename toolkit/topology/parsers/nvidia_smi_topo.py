"""Read `nvidia-smi topo -m`: links between GPUs, links from GPUs to NICs, CPU and NUMA affinity.

Cells are told by their vocabulary, never by their column on the screen: header and rows are often indented
differently, and old drivers print other headers. A row that does not fit the header is repaired only when there
is one way to read it, otherwise its cells are unknown; both are reported with the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header on a terminal and in some pipes
CELL = r"(?:X|NV[0-9]+|PIX|PXB|PHB|NODE|SYS|SOC)"
GPU = re.compile(r"GPU[0-9]+$")
LEGEND_LINE = re.compile(r"(NIC[0-9]+):\s*(\S+)$")
AFFINITY = re.compile(r"(?:N/A|[0-9][0-9,-]*)$")
AFFINITY_TITLES = ("CPUAffinity", "NUMAAffinity", "GPUNUMAID")


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
    """Read the whole output: (matrix, warnings that name the damaged lines)."""
    lines = [ESCAPES.sub("", line).strip() for line in text.splitlines()]
    warnings: list[str] = []
    start, devices, titles = _header(lines)
    if not devices:
        warnings.append("line 1: no header with GPU columns")
    legend = {match[1]: match[2] for line in lines if (match := LEGEND_LINE.match(line))}

    cells: dict[str, list[str | None]] = {}
    affinities: dict[str, dict[str, str]] = {}
    for number, line in enumerate(lines[start:], start=start + 1):
        name, _, rest = line.replace("\t", " ").partition(" ")
        if name not in devices:
            continue
        if name in cells:
            warnings.append(f"line {number}: a second row {name}, ignored")
            continue
        tokens, problem = _cells(rest.split(), devices, name)
        if problem:
            warnings.append(f"line {number}: row {name}: {problem}")
        cells[name] = tokens[: len(devices)] or [None] * len(devices)
        if GPU.match(name) and tokens:
            tail = [token for token in tokens[len(devices) :] if token]
            affinities[name], problem = _affinities(tail, titles)
            if problem:
                warnings.append(f"line {number}: row {name}: {problem}")
    return _matrix(devices, cells, affinities, legend, warnings), tuple(warnings)


def _header(lines: list[str]) -> tuple[int, list[str], list[str]]:
    """Find the header: (number of lines up to and with it, device columns, affinity titles)."""
    for index, line in enumerate(lines):
        tokens = line.split()
        if not tokens or not GPU.match(tokens[0]) or (len(tokens) > 1 and re.fullmatch(CELL, tokens[1])):
            continue
        devices = tokens[: tokens.index("CPU")] if "CPU" in tokens else tokens
        # Wrapped terminals break a title in two ("CPU Affi   nity"), so titles are looked up without blanks.
        tail = "".join(tokens[len(devices) :])
        return index + 1, list(dict.fromkeys(devices)), [title for title in AFFINITY_TITLES if title in tail]
    return len(lines), [], []


def _cells(tokens: list[str], devices: list[str], name: str) -> tuple[list[str | None], str]:
    """Split a row into its link cells and what follows: (tokens, problem). No tokens: nothing can be trusted."""
    split: list[str | None] = []
    problem = ""
    for token in tokens:
        if len(split) < len(devices) and re.fullmatch(f"{CELL}{{2,}}", token):
            problem = f"cells run together in {token!r}, read apart"
            split.extend(re.findall(CELL, token))
        else:
            split.append(token)
    count = next((i for i, token in enumerate(split) if not re.fullmatch(CELL, token or "")), len(split))
    if count != len(devices):
        return [], f"{count} link cells for {len(devices)} columns, row ignored"
    if split[devices.index(name)] != "X":
        return [], f"no X in its own column, row ignored {problem}".rstrip()
    return split, problem


def _affinities(tokens: list[str], titles: list[str]) -> tuple[dict[str, str], str]:
    """Pair the cells after the links with their titles: (by title, problem)."""
    joined: list[str] = []
    for token in tokens:
        if joined and (joined[-1][-1] in ",-" or token[0] in ",-"):
            joined[-1] += token  # one list that a line wrap cut in two
        else:
            joined.append(token)
    if len(joined) != len(titles) or not all(AFFINITY.match(token) for token in joined):
        return {}, f"{len(joined)} affinity cells {joined} for {len(titles)} columns, ignored"
    problem = "" if len(joined) == len(tokens) else f"an affinity list was cut in two, read as {joined}"
    return dict(zip(titles, joined, strict=True)), problem


def _matrix(
    devices: list[str],
    cells: dict[str, list[str | None]],
    affinities: dict[str, dict[str, str]],
    legend: dict[str, str],
    warnings: list[str],
) -> LinkMatrix:
    gpus = [name for name in devices if GPU.match(name)]
    nics = [name for name in devices if not GPU.match(name)]
    warnings.extend(f"no row for {name}" for name in gpus if name not in cells)
    nothing: list[str | None] = [None] * len(devices)
    rows = [dict(zip(devices, cells.get(gpu, nothing), strict=True)) for gpu in gpus]
    for i, one in enumerate(gpus):
        for j, other in enumerate(gpus[:i]):
            there, back = rows[i][other], rows[j][one]
            if there and back and there != back:
                warnings.append(f"{one} to {other} reads {there}, {other} to {one} reads {back}: both ignored")
                rows[i][other] = rows[j][one] = None

    def column(title: str) -> tuple[str | None, ...]:
        return tuple(affinities.get(gpu, {}).get(title) for gpu in gpus)

    return LinkMatrix(
        gpus=tuple(gpus),
        nics=tuple(nics),
        nic_devices=tuple(legend.get(nic) for nic in nics),
        gpu_links=tuple(tuple(row[gpu] for gpu in gpus) for row in rows),
        nic_links=tuple(tuple(row[nic] for nic in nics) for row in rows),
        cpu_affinity=column("CPUAffinity"),
        numa_affinity=column("NUMAAffinity"),
        gpu_numa_id=column("GPUNUMAID"),
    )

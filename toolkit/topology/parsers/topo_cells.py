"""The cells of `nvidia-smi topo -m`: one line of its header, one of its rows.

Cells are told by their vocabulary, never by their column on the screen: header and rows are often indented
differently, and a short list of CPUs draws the cells behind it nearer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

CELL = r"(?:X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|SOC)"
GPU = re.compile(r"GPU[0-9]{1,4}")
NIC = re.compile(r"NIC[0-9]{1,4}")
DEVICE = re.compile(r"(?:GPU|NIC)[0-9]{1,4}|[a-z][A-Za-z0-9_.-]{1,31}")  # old drivers print the NIC's own name
TITLES = ("CPUAffinity", "NUMAAffinity", "GPUNUMAID")
_TITLES_OF_A_DRIVER = tuple(TITLES[:count] for count in range(len(TITLES), -1, -1))
_RUN = re.compile(r"(?:0|[1-9][0-9]{0,4})(?:-[1-9][0-9]{0,4})?")


@dataclass(frozen=True)
class Header:
    """`columns`: the devices, None for a name that is none or stands there twice. `titles`: what follows them, None
    where it cannot be read."""

    columns: tuple[str | None, ...]
    titles: tuple[str, ...] | None


@dataclass(frozen=True)
class Row:
    """What one row says: links by the column's place, and the cells behind them by their title."""

    number: int
    name: str
    links: tuple[str, ...]
    affinities: dict[str, str]


def is_header(text: str) -> bool:
    """A line that names GPUs and holds no link."""
    tokens = text.split()
    links = [token for token in tokens[1:] if re.fullmatch(f"{CELL}+", token)]
    return (
        not links and any(GPU.match(token) for token in tokens) and (len(tokens) > 1 or bool(GPU.fullmatch(tokens[0])))
    )


def read_header(text: str) -> tuple[Header, list[str]]:
    """Read the line above the rows: (header, what is wrong with it)."""
    problems: list[str] = []
    tokens = [name for token in text.split() for name in _apart(token, r"(?:GPU|NIC)[0-9]+", problems)]
    # A wrapped terminal breaks a title in two ("CPU Affi   nity"), so titles are looked up without blanks.
    found: tuple[int, tuple[str, ...] | None] | None = next(
        ((begin, titles) for begin in range(len(tokens) + 1) for titles in _TITLES_OF_A_DRIVER
         if "".join(tokens[begin:]) == "".join(titles)),
        None,
    )  # fmt: skip
    if found is None or not found[1]:
        begin = next((place for place, token in enumerate(tokens) if not DEVICE.fullmatch(token)), len(tokens))
        problems.append(f"the titles behind the devices are {tokens[begin:]}, not CPU Affinity and what may follow it")
        found = (begin, None)
    names = tokens[: found[0]]
    columns = tuple(name if DEVICE.fullmatch(name) and names.count(name) == 1 else None for name in names)
    problems += [
        f"{name!r} is no device, or stands there twice" for name, seen in zip(names, columns, strict=True) if not seen
    ]
    for form in ("GPU", "NIC"):
        numbers = [int(name[3:]) for name in columns if name and re.fullmatch(f"{form}[0-9]+", name)]
        if numbers != list(range(len(numbers))):
            problems.append(f"{form}s are numbered {numbers}, not from 0 on")
    places = [place for place, name in enumerate(columns) if name and GPU.fullmatch(name)]
    if places != list(range(len(places))):
        problems.append("GPUs do not stand before the other devices")
    return Header(columns, found[1]), problems


def read_row(number: int, text: str, header: Header, *, cut: bool) -> tuple[Row | None, list[str]]:
    """Read one row: (what it says, what is wrong with it). None: nothing in it can be trusted."""
    name, *tokens = text.split()
    problems: list[str] = []
    cells = [cell for token in tokens for cell in _apart(token, CELL, problems)]
    count = next((place for place, cell in enumerate(cells) if not re.fullmatch(CELL, cell)), len(cells))
    if count != len(header.columns):
        return None, [f"{count} link cells for {len(header.columns)} columns, row ignored", *problems]
    own = [place for place, cell in enumerate(cells[:count]) if cell == "X"]
    right = header.columns.index(name) if name in header.columns else None
    if len(own) != 1 or (own[0] != right if right is not None else header.columns[own[0]] is not None):
        return None, ["no X in its own column, or another X, row ignored", *problems]
    tail = cells[count:]
    if cut and tail and tail[-1] != "N/A":
        return Row(number, name, tuple(cells[:count]), {}), [f"{tail[-1]!r} may be cut, affinities ignored", *problems]
    if cut and not tail and GPU.fullmatch(name):
        return None, ["the row is cut", *problems]
    affinities: dict[str, str] = {}
    if GPU.fullmatch(name):
        affinities, problem = _affinities(tail, header.titles)
        problems += [problem] * bool(problem)
    elif tail:
        problems.append(f"{tail} behind the links of a device that is no GPU")
    return Row(number, name, tuple(cells[:count]), affinities), problems


def _apart(token: str, form: str, problems: list[str]) -> list[str]:
    """Cells that a lost tab joined, where there is one way to read them."""
    parts = re.findall(form, token)
    if len(parts) < 2 or "".join(parts) != token:
        return [token]
    problems.append(f"cells run together in {token!r}, read apart")
    return parts


def _affinities(tokens: Sequence[str], titles: tuple[str, ...] | None) -> tuple[dict[str, str], str]:
    """Pair the cells after the links with their titles: (by title, problem)."""
    if titles is None:
        return {}, ""
    joined: list[str] = []
    for token in tokens:
        if joined and (joined[-1][-1] in ",-" or token[0] in ",-"):
            joined[-1] += token  # one list that a line wrap cut in two
        else:
            joined.append(token)
    if len(joined) != len(titles) or not all(_is_list(cell) for cell in joined):
        return {}, f"{len(joined)} affinity cells {joined} for {len(titles)} columns, ignored"
    by_title = dict(zip(titles, joined, strict=True))
    problem = "" if len(joined) == len(tokens) else f"an affinity list was cut in two, read as {joined}"
    if not joined[-1].isdigit() and len(joined) == len(TITLES) and joined[-1] != "N/A":
        return {}, f"{joined[-1]!r} is no GPU NUMA ID, affinities ignored"
    cpus, nodes = joined[0], by_title.get("NUMAAffinity", "N/A")
    if nodes != "N/A" and (cpus == "N/A" or len(numbers_of(cpus)) < len(numbers_of(nodes))):
        problem = f"CPUs {cpus} are fewer than NUMA nodes {nodes}: a small cpuset, or cells that were exchanged"
    if nodes == "N/A" and by_title.get("GPUNUMAID", "N/A") != "N/A":
        problem = f"a GPU NUMA ID without a NUMA affinity in {joined}, affinities ignored"
        by_title = {}
    return by_title, problem


def numbers_of(cell: str) -> set[int]:
    """The numbers of a list of runs, "0-2,5"."""
    runs = [[int(number) for number in run.split("-")] for run in cell.split(",")]
    return {number for run in runs for number in range(run[0], run[-1] + 1)}


def _is_list(cell: str) -> bool:
    """ "0-19,40-59": runs of numbers that rise; "N/A" where the driver does not know."""
    if cell == "N/A":
        return True
    runs = cell.split(",")
    if len(cell) > 4000 or not all(_RUN.fullmatch(run) for run in runs):
        return False
    numbers = [int(number) for run in runs for number in run.split("-")]
    return numbers == sorted(set(numbers))

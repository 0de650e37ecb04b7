"""Read the output of `lscpu`: CPUs, cores, sockets and NUMA nodes, from the summary or the tables (`-e`, `-p`)."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.topology.readers.lines import Line, first_damaged, read_lines, refusal
from toolkit.world.cpu_lists import cpu_list, read_cpu_list

KEYS = {
    "cpus": "number of CPUs (hardware threads), including offline ones",
    "numa_nodes": "number of NUMA nodes",
    "sockets": "number of sockets",
    "cores": "number of cores in all sockets",
    "threads_per_core": "hardware threads per core; the maximum if cores differ",
    "node0_cpus": "CPU numbers of NUMA node 0",
    "node_cpus": 'CPUs of each NUMA node by its number, as a list with ranges ("0-15,64-79")',
}
_KEY_LINE = re.compile(r"\s*([^\s:][^:]*?)\s*:(?:\s+(.*))?")
_NODE = re.compile(r"NUMA node([0-9]{1,4}) CPU\(s\)")
_COUNTS = {
    "cpus": "CPU(s)", "threads": "Thread(s) per core", "cores": "Core(s) per socket", "sockets": "Socket(s)",
    "nodes": "NUMA node(s)",
}  # fmt: skip
_ONLINE, _OFFLINE, _TYPE = "On-line CPU(s) list", "Off-line CPU(s) list", "Model name"
_OWN = {"CPU op-mode(s)", "BogoMIPS", "L1d cache", "L2 cache", "L3 cache", _ONLINE, *_COUNTS.values()}
_TWO_KEYS = re.compile(r"[A-Za-z)]:\s{2,}")
_NUMBER = re.compile(r"[0-9]{1,6}", re.ASCII)
_COLUMNS = {"CPU", "CORE", "SOCKET", "NODE", "ONLINE", "CLUSTER", "BOOK", "DRAWER"}
_CELL = re.compile(r"[0-9]{0,6}|-", re.ASCII)


@dataclass(frozen=True)
class Processors:
    """The facts that lscpu prints. Counts are None if unknown; a NUMA node with a damaged line is None in `node_cpus`."""

    cpus: int | None = None
    sockets: int | None = None
    cores: int | None = None
    threads_per_core: int | None = None
    numa_nodes: int | None = None
    node_cpus: Mapping[int, tuple[int, ...] | None] | None = None


def parse_lscpu(text: str) -> tuple[Processors, tuple[str, ...]]:
    """Return (facts, the warning that names the first damaged line) for output of lscpu.

    Raises:
        CheckFailedError: `text` is not the output of lscpu.
    """
    lines, warnings = read_lines(text)
    header = next((place for place, line in enumerate(lines) if _header(line.text)), None)
    if header is not None:
        columns = _header(lines[header].text)
        missing = [name for name in ("NODE", "SOCKET", "CORE") if name not in columns]
        facts = _Table(columns, "," in lines[header].text).read(lines[header + 1 :], warnings)
        warnings += [f"line {lines[header].number}: no column {', '.join(missing)}"] if missing else []
    elif any((match := _KEY_LINE.fullmatch(line.text)) and _is_own(match[1]) for line in lines):
        facts = _Summary(lines, warnings).facts()
    else:
        raise refusal("lscpu", lines)
    return facts, first_damaged(warnings)


def _is_own(key: str) -> bool:
    return key in _OWN or bool(_NODE.fullmatch(key))


class _Summary:
    """The summary that lscpu prints without options: one key and its value per line."""

    def __init__(self, lines: Sequence[Line], warnings: list[str]) -> None:
        self.warnings = warnings
        self.last = lines[-1].number
        self.values: dict[str, set[str]] = defaultdict(set)
        self.nodes: dict[int, tuple[int, ...] | None] = {}
        for line in lines:
            match = _KEY_LINE.fullmatch(line.text)
            if match is None or _TWO_KEYS.search(match[2] or ""):
                self.warnings.append(
                    f"line {line.number}: expected one key and its value, got {line.text.strip()[:60]!r}"
                )
            elif node := _NODE.fullmatch(match[1]):
                self._node(int(node[1]), match[2] or "", line.number)
            else:
                self.values[match[1]].add((match[2] or "").strip())

    def facts(self) -> Processors:
        """Return the facts from all lines."""
        counts = {key: self._count(name) for key, name in _COUNTS.items()}
        self._compare(counts)
        cpus, threads, cores, sockets = (counts[key] for key in ("cpus", "threads", "cores", "sockets"))
        all_cores = sockets * cores if sockets and cores else None
        # On hosts with two types of cores, and some Arm servers, sockets x cores x threads differs from the CPU count.
        known = all_cores if all_cores and cpus == all_cores * (threads or 0) else None
        return Processors(cpus, sockets, known, threads, counts["nodes"], self.nodes or None)

    def _node(self, node: int, value: str, number: int) -> None:
        cpus = read_cpu_list(value)
        if cpus is None:
            self.warnings.append(f"line {number}: expected the CPUs of NUMA node {node}, got {value[:60]!r}")
        if self.nodes.get(node, cpus) != cpus:
            self.warnings.append(f"line {number}: an earlier line has different CPUs for NUMA node {node}")
            cpus = None
        for other, theirs in self.nodes.items():
            if other != node and set(cpus or ()) & set(theirs or ()):
                self.warnings.append(f"line {number}: NUMA nodes {other} and {node} share CPUs")
                self.nodes[other] = cpus = None
        self.nodes[node] = cpus

    def _count(self, name: str) -> int | None:
        """Return the number on which all lines of a key agree; a host with two types of cores prints some keys twice."""
        found = {value.split("#")[0].strip() for value in self.values[name]}
        wrong = [value for value in found if value != "-" and not _NUMBER.fullmatch(value)]
        if wrong or not found:
            self.warnings.append(
                f"line {self.last}: expected a number for {name}, got {repr(wrong[0][:60]) if wrong else 'no line'}"
            )
        return int(found.pop()) if len(found) == 1 and not wrong and found != {"-"} else None

    def _compare(self, counts: Mapping[str, int | None]) -> None:
        """Add warnings about counts and lists that contradict each other."""
        online = read_cpu_list(next(iter(self.values[_ONLINE]), ""))
        cpus, nodes = counts["cpus"], counts["nodes"]
        is_plain = len(self.values[_TYPE]) <= 1 and not self.values[_OFFLINE]
        if cpus and online and not self.values[_OFFLINE] and len(online) != cpus:
            self.warnings.append(f"line {self.last}: {cpus} CPUs, but {len(online)} are online")
        factors = [counts[key] or 0 for key in ("sockets", "cores", "threads")]
        product = factors[0] * factors[1] * factors[2]
        if is_plain and cpus and product and product != cpus:
            self.warnings.append(f"line {self.last}: {cpus} CPUs, but sockets x cores x threads = {product}")
        if nodes is not None and nodes != len(self.nodes):
            self.warnings.append(f"line {self.last}: expected lines for {nodes} NUMA nodes, got {len(self.nodes)}")
        elsewhere = sorted(cpu for cpus in self.nodes.values() for cpu in cpus or ())
        for node, listed in self.nodes.items():
            if listed == () and online and elsewhere != list(online):
                self.warnings.append(f"line {self.last}: the CPU list of NUMA node {node} is missing")
                self.nodes[node] = None


def _header(text: str) -> list[str]:
    """Return the column names of a header such as "# CPU,Core,Socket,Node,,L1d" in capitals; [] for any other line."""
    body = text.lstrip("# ")
    columns = [name.strip().upper() for name in (body.split(",") if "," in body else body.split())]
    return columns if "CPU" in columns and sum(name in _COLUMNS for name in columns) >= 2 else []


class _Table:
    """The table of `lscpu -e` or `lscpu -p`, one row per CPU. If a row is damaged, all facts are unknown."""

    def __init__(self, columns: list[str], commas: bool) -> None:
        self.columns, self.commas = columns, commas

    def read(self, lines: Sequence[Line], warnings: list[str]) -> Processors:
        """Return the facts from all rows."""
        rows: list[dict[str, str]] = []
        for line in lines:
            if line.text.startswith("#"):
                continue
            cells = [cell.strip() for cell in line.text.split(",")] if self.commas else line.text.split()
            row = dict(zip(self.columns, cells, strict=False))
            numbers = [row.get(name, "-") for name in ("CPU", "CORE", "SOCKET", "NODE")]
            # Model names may contain spaces, so a row may have more cells than the header, but not fewer.
            has_all = len(cells) == len(self.columns) or (
                "MODELNAME" in self.columns and len(cells) > len(self.columns)
            )
            if not has_all or not all(_CELL.fullmatch(cell) for cell in numbers) or numbers[0] != str(len(rows)):
                warnings.append(
                    f"line {line.number}: expected the row of CPU {len(rows)}, got {line.text.strip()[:60]!r}"
                )
                return Processors()
            rows.append(row)
        return Processors() if warnings else self._facts(rows, lines[-1].number if lines else 1, warnings)

    def _facts(self, rows: Sequence[Mapping[str, str]], last: int, warnings: list[str]) -> Processors:
        nodes: dict[int, list[int]] = defaultdict(list)
        cores: dict[str, list[tuple[str | None, ...]]] = defaultdict(list)
        for cpu, row in enumerate(rows):
            if row.get("NODE", "-") not in ("-", ""):
                nodes[int(row["NODE"])].append(cpu)
            if row.get("CORE", "-") not in ("-", ""):
                cores[row["CORE"]].append((row.get("SOCKET"), row.get("NODE")))
        sizes = [len(members) for members in cores.values()]
        if any(len(set(members)) > 1 for members in cores.values()) or len(set(sizes)) > 1:
            warnings.append(f"line {last}: the CPUs of a core have different sockets or nodes, or rows are missing")
            return Processors()
        sockets = {row["SOCKET"] for row in rows if row.get("SOCKET", "-") not in ("-", "")}
        return Processors(
            cpus=len(rows) or None,
            sockets=len(sockets) or None,
            cores=len(cores) or None,
            threads_per_core=max(sizes, default=None),
            numa_nodes=len(nodes) or None,
            node_cpus={node: tuple(cpus) for node, cpus in sorted(nodes.items())} or None,
        )


def answer_lscpu(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (values of `KEYS`, warnings).

    Raises:
        CheckFailedError: `text` is not the output of lscpu.
    """
    facts, warnings = parse_lscpu(text)
    nodes = facts.node_cpus
    return {
        "cpus": facts.cpus,
        "numa_nodes": facts.numa_nodes,
        "sockets": facts.sockets,
        "cores": facts.cores,
        "threads_per_core": facts.threads_per_core,
        "node0_cpus": None if nodes is None or nodes.get(0) is None else list(nodes[0] or ()),
        "node_cpus": None
        if nodes is None
        else {str(node): None if cpus is None else cpu_list(cpus) for node, cpus in nodes.items()},
    }, warnings

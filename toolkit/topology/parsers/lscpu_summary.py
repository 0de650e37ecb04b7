"""The summary that `lscpu` prints without options: one key and its value a line.

It repeats itself: the counts multiply to the number of processors, and the lists of the NUMA nodes make up the list of
those that are online. A number that does not fit is named. Keys are known in a few languages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolkit.topology.parsers.cpu_lists import cpu_list, read_cpu_list
from toolkit.topology.parsers.host_lines import Line
from toolkit.topology.parsers.lscpu_facts import Processors

_KEY_LINE = re.compile(r"\s*([^\s:：][^:：]*?)\s*[:：](?:\s+(.*))?$")
_NAMES = {
    "architecture": ("Architecture", "Architektur", "架构", "Arquitectura", "Architettura"),
    "cpus": ("CPU(s)", "CPU", "Processeur(s)"),
    "online": ("On-line CPU(s) list", "Liste der Online-CPU(s)", "在线 CPU 列表", "Lista de la(s) CPU(s) en línea",
               "Liste de processeur(s) en ligne"),
    "offline": ("Off-line CPU(s) list", "Liste der Offline-CPU(s)", "离线 CPU 列表"),
    "threads": ("Thread(s) per core", "Thread(s) pro Kern", "每个核的线程数", "Hilo(s) de procesamiento por núcleo",
                "Thread(s) par cœur"),
    "cores": ("Core(s) per socket", "Core(s) per cluster", "Kern(e) pro Socket", "每个座的核数", "Núcleo(s) por «socket»",
              "Cœur(s) par socket"),
    "sockets": ("Socket(s)", "Sockel", "座", "«Socket(s)»"),
    "clusters": ("Cluster(s)",),
    "nodes": ("NUMA node(s)", "NUMA-Knoten", "NUMA 节点", "Modo(s) NUMA", "Nœud(s) NUMA"),
    "type": ("Model name", "Modellname", "型号名称", "Nombre del modelo", "Nom de modèle"),
}  # fmt: skip
_MEANING = {name: meaning for meaning, names in _NAMES.items() for name in names}
_NODE = re.compile(r"(?:NUMA node|NUMA-Knoten|NUMA 节点|Nœud NUMA )([0-9]{1,4})(?: CPU\(s\)| CPU| de processeur\(s\))")
_ALL_KEYS = re.compile(
    "(?:" + "|".join(re.escape(name) for name in sorted(_MEANING, key=len, reverse=True)) + r"|[A-Z][A-Za-z0-9]*(?: [A-Za-z()0-9-]+){0,3})[:：]\s{2,}"
)  # fmt: skip
_NUMBER = re.compile(r"[0-9]{1,6}", re.ASCII)
_EXPECTED = {"cpus": "CPU(s)", "threads": "Thread(s) per core", "cores": "Core(s) per socket", "sockets": "Socket(s)"}


def is_summary(lines: Sequence[Line]) -> bool:
    """Whether some line has a key that no other command prints so."""
    keys = {match[1] for line in lines if (match := _KEY_LINE.match(line.text))}
    own = {name for name in _MEANING if name != "CPU"} | {
        "BogoMIPS",
        "CPU op-mode(s)",
        "L1d cache",
        "L2 cache",
        "L3 cache",
    }
    return any(key in own or _NODE.fullmatch(key) for key in keys)


def read_summary(lines: Sequence[Line], warnings: list[str]) -> Processors:
    """The facts of a summary; what does not fit is added to the warnings."""
    values: dict[str, list[tuple[Line, str]]] = {}
    nodes: dict[int, tuple[int, ...] | None] = {}
    for line in lines:
        match = _KEY_LINE.match(line.text)
        if not match or _ALL_KEYS.search(match[2] or ""):
            warnings.append(f"line {line.number}: not one key with its value: {line.text.strip()[:60]!r}")
            continue
        if numbered := _NODE.fullmatch(match[1]):
            _read_node(int(numbered[1]), match[2] or "", line, nodes, warnings)
        else:
            values.setdefault(_MEANING.get(match[1], match[1]), []).append((line, match[2] or ""))
    _name_repeats(values, warnings)
    last = lines[-1].number
    facts = Processors(
        cpus=_count(values, "cpus", warnings),
        sockets=_count(values, "sockets", warnings),
        threads_per_core=_count(values, "threads", warnings),
        numa_nodes=_count(values, "nodes", warnings),
        node_cpus=nodes or None,
    )
    cores_per_socket = _count(values, "cores", warnings)
    warnings.extend(f"line {last}: there is no line {name!r}" for key, name in _EXPECTED.items() if key not in values)
    _compare(facts, cores_per_socket, values, last, warnings)
    for node, cpus in nodes.items():
        if cpus == () and not _all_online_are_elsewhere(nodes, values):
            warnings.append(f"line {last}: NUMA node {node} has no processors, or its list is lost")
            nodes[node] = None
    cores = None
    if facts.sockets and cores_per_socket and len(values.get("cores", ())) == 1:
        # On an arm server `Socket(s)` may be `-`: then nothing says how many cores there are in all.
        cores = facts.sockets * cores_per_socket
        if facts.cpus != cores * (facts.threads_per_core or 0):
            cores = None
    return Processors(facts.cpus, facts.sockets, cores, facts.threads_per_core, facts.numa_nodes, facts.node_cpus)


def _read_node(
    node: int, value: str, line: Line, nodes: dict[int, tuple[int, ...] | None], warnings: list[str]
) -> None:
    cpus = read_cpu_list(value)
    if cpus is None:
        warnings.append(f"line {line.number}: the processors of NUMA node {node} are no list: {value[:60]!r}")
    if node in nodes:
        warnings.append(f"line {line.number}: NUMA node {node} stands in an earlier line, too; neither is believed")
        cpus = None
    elif nodes and node <= max(nodes):
        warnings.append(f"line {line.number}: NUMA node {node} stands behind node {max(nodes)}")
    for other, theirs in nodes.items():
        if cpus and theirs and set(cpus) & set(theirs):
            warnings.append(f"line {line.number}: NUMA nodes {other} and {node} share processors; neither is believed")
            nodes[other] = cpus = None
    nodes[node] = cpus


def _name_repeats(values: dict[str, list[tuple[Line, str]]], warnings: list[str]) -> None:
    """A host with two types of cores prints a block for each, so that a key may repeat as often as the type's name."""
    types = len(values.get("type", ()))
    for found in values.values():
        if len(found) > 1 and (len(found) != types or found[1][0].number == found[0][0].number + 1):
            line, value = found[-1]
            warnings.append(f"line {line.number}: a key that stands in line {found[0][0].number}, too: {value[:60]!r}")


def _count(values: dict[str, list[tuple[Line, str]]], key: str, warnings: list[str]) -> int | None:
    numbers = set()
    for line, value in values.get(key, ()):
        number = value.split("#")[0].strip()
        if number == "-":
            return None
        if not _NUMBER.fullmatch(number):
            warnings.append(f"line {line.number}: no number: {line.text.strip()[:60]!r}")
            return None
        numbers.add(int(number))
    return numbers.pop() if len(numbers) == 1 else None


def _all_online_are_elsewhere(
    nodes: dict[int, tuple[int, ...] | None], values: dict[str, list[tuple[Line, str]]]
) -> bool:
    """Whether the other nodes have all processors, so that a node without a list has memory alone."""
    online = read_cpu_list(values["online"][0][1]) if "online" in values else None
    return bool(online) and sorted(cpu for cpus in nodes.values() for cpu in cpus or ()) == list(online or ())


def _compare(
    facts: Processors,
    cores_per_socket: int | None,
    values: dict[str, list[tuple[Line, str]]],
    last: int,
    warnings: list[str],
) -> None:
    """Name what the counts and lists say against each other."""
    at = values["cpus"][0][0].number if "cpus" in values else last
    online = read_cpu_list(values["online"][0][1]) if "online" in values else None
    if "online" in values and not online:
        warnings.append(f"line {values['online'][0][0].number}: no list of processors: {values['online'][0][1][:60]!r}")
    if facts.cpus is not None and online is not None and "offline" not in values and len(online) != facts.cpus:
        warnings.append(f"line {at}: {facts.cpus} processors, but {len(online)} are online: {cpu_list(online)}")
    if facts.cpus is not None and "online" not in values:
        warnings.append(f"line {at}: there is no line 'On-line CPU(s) list'")
    if "architecture" not in values:
        warnings.append(f"line {last}: there is no line 'Architecture', with which lscpu begins")
    one_type = len(values.get("type", ())) <= 1 and "offline" not in values
    if one_type and facts.cpus and facts.sockets and facts.threads_per_core and cores_per_socket:
        product = facts.sockets * cores_per_socket * facts.threads_per_core
        if product != facts.cpus:
            warnings.append(f"line {at}: {facts.cpus} processors, but sockets, cores and threads multiply to {product}")
    nodes = facts.node_cpus or {}
    if facts.numa_nodes is not None and facts.numa_nodes != len(nodes):
        warnings.append(
            f"line {values['nodes'][0][0].number}: {facts.numa_nodes} NUMA nodes, but {len(nodes)} have a line"
        )
    if nodes and "nodes" not in values:
        warnings.append(f"line {last}: NUMA nodes have lines, but there is no line 'NUMA node(s)'")
    known = [cpus for cpus in nodes.values() if cpus is not None]
    if online and known and len(known) == len(nodes) and sorted(cpu for cpus in known for cpu in cpus) != list(online):
        warnings.append(f"line {last}: the processors of the NUMA nodes are not those that are online")

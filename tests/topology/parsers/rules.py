"""What is known of each kind of output: wrong sidecars, warnings that are right, damaged texts that are as valid as
before, and how facts follow that do not stand in the text as they are."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.slurm.hostlist import expand_hostlist

Rule = Callable[[Any, Mapping[str, Any], str], bool]

# (kind, sample): {key: (the right value, why the sidecar is wrong)}.
WRONG: dict[tuple[str, str], dict[str, tuple[Any, str]]] = {
    ("lstopo", "007"): {"osdevs": (10, "ten lines OSDev are printed, and `Special depth -6: 10 OSDev` counts them")},
    ("nccl-tests", "013"): {"nodes": (None, "the rows say by their ratio how many ranks there are, nothing says where")},
    ("scontrol-show-topology", "003"): {
        "undefined_child_switches": ([], "the three have records, on the line where four records stand together")
    },
    ("slurm-topology-conf", "001"): {
        "leaf_switches": ({f"leaf{number}": 20 for number in range(100, 600)}, "says only how many there are"),
        "nodes_on_two_leaves": ([], "was not computed"),
    },
}  # fmt: skip

# (kind, sample): what a right warning says of a text that is complete, and why.
WARNED: dict[tuple[str, str], tuple[str, str]] = {
    ("scontrol-show-topology", "003"): ("4 records stand on one line", "its line ends were lost"),
    ("slurm-topology-conf", "011"): ("circe-n051 is listed by s2", "the file has this fault"),
    ("scontrol-show-job", "005"): ("JobId=30214 has a record on line 1", "the job is printed twice"),
    ("scontrol-show-job", "007"): ("NumNodes=3, but NodeList names 1", "the file was edited to say so"),
    ("scontrol-show-node", "005"): ("line 5: the record is not whole, without NodeHostName", "it runs into NodeAddr"),
    ("squeue", "001"): ("no header", "printed with --noheader"),
    ("sinfo", "001"): ("fields under", "one of its rows has a field more than the header"),
    ("nccl-tests", "009"): ("that of the rows", "its author took rows, columns and settings out"),
    ("ibstat", "007"): ("ibpanic", "the command ended so, behind whole adapters"),
    ("ibnetdiscover", "001"): ("no link", "a topology without links"),
    ("fi_info", "003"): ("without version", "its author shortened it"),
}  # fmt: skip


def _tree_of(text: str) -> dict[str, tuple[list[str], list[str]]] | None:
    """The nodes and children of each switch or block of a topology.conf, by its manual; None where it breaks a rule."""
    records: dict[str, tuple[list[str], list[str]]] = {}
    for line in text.splitlines():
        words = [word.partition("=") for word in line.partition("#")[0].split()]
        keys = [key.lower() for key, _, _ in words]
        if not words:
            continue
        if keys[0] not in ("switchname", "blockname") or len(set(keys)) < len(keys) or words[0][2] in records:
            return None
        values = dict(zip(keys, (value for _, _, value in words), strict=True))
        if not keys[1:] or set(keys[1:]) - {"nodes", "switches", "level", "linkspeed", "blockindex", "blocksize"}:
            return None
        try:
            lists = [expand_hostlist(values[key]) if key in values else [] for key in ("nodes", "switches")]
        except ToolkitError:
            return None
        if not any(lists) or any(
            key in values and not names for key, names in zip(("nodes", "switches"), lists, strict=True)
        ):
            return None
        records[words[0][2]] = (lists[0], lists[1])
    return records


def valid_topology(text: str, whole: str) -> bool:
    """Every line is a record of its manual's, every child has one, and no node stands on one leaf more than before."""
    now, before = _tree_of(text), _tree_of(whole)
    if not now or not before or not text.endswith("\n"):
        return False
    sharing = [sum(len(nodes) for nodes, _ in tree.values()) - len({n for nodes, _ in tree.values() for n in nodes})
               for tree in (now, before)]  # fmt: skip
    return all(child in now for _, below in now.values() for child in below) and sharing[0] <= sharing[1]


def fewer_rows(text: str, whole: str) -> bool:
    """The same header, and below it whole rows of the table, none of them more often than before."""
    rows, all_rows = text.splitlines(), Counter(whole.splitlines())
    header, first = (next((line for line in of if line.strip()), "") for of in (whole.splitlines(), rows))
    same = header == first or bool(re.search(r"[0-9]", header))  # one with --noheader has no header to lose
    alike = any(times > 1 and line.strip() for line, times in all_rows.items())  # names were taken out of it
    return same and text.endswith("\n") and (set(rows) <= set(all_rows) if alike else Counter(rows) <= all_rows)


def fewer_records(text: str, whole: str) -> bool:
    """As above, where each record stands on one line (`scontrol -o`)."""
    return all(re.match(r"\s*(JobId|NodeName|PartitionName)=|$", line) for line in whole.splitlines()) and fewer_rows(
        text, whole
    )


def other_features(text: str, whole: str) -> bool:
    """A node has other features, which both of its lines say alike."""
    rows, before = text.splitlines(), whole.splitlines()
    if len(rows) != len(before):
        return False
    changed = [row.partition("=") for row, old in zip(rows, before, strict=True) if row != old]
    names = {key.strip() for key, _, _ in changed}
    return names == {"AvailableFeatures", "ActiveFeatures"} and len({value for _, _, value in changed}) == 1


def other_columns(text: str, whole: str) -> bool:
    """Every line lost or changed the same columns as the header: what `-o` might have asked for."""
    rows, before = text.splitlines(), whole.splitlines()
    return len(rows) == len(before) and all(row != old for row, old in zip(rows, before, strict=True) if old.strip())


# kind: what the command might have printed as well, so that no reader can tell: (now, undamaged) -> whether it is such a
# text. Only whole texts are: the last line has its end.
VALID: dict[str, list[Callable[[str, str], bool]]] = {
    "scontrol-show-topology": [valid_topology],
    "slurm-topology-conf": [valid_topology],
    "squeue": [fewer_rows, other_columns],
    "sacct": [fewer_rows, other_columns],
    "sinfo": [fewer_rows, other_columns],
    "scontrol-show-job": [fewer_records],
    "scontrol-show-node": [fewer_records, other_features],
    "scontrol-show-partition": [fewer_records],
    "nvidia-smi-query-gpu": [fewer_rows, other_columns],
    "ibdev2netdev": [fewer_rows],
    "hostlist": [lambda text, whole: text.count("[") == text.count("]")],
}


def FREE(value: Any, answer: Mapping[str, Any], text: str) -> bool:
    """Derived, and not checked here."""
    return True


def word(*words: str) -> Rule:
    """One of the reader's own words."""
    return lambda value, answer, text: value in words


def matches(pattern: str) -> Rule:
    """At most as many as the pattern occurs in the text."""
    return lambda value, answer, text: value <= len(re.findall(pattern, text, re.MULTILINE))


def length_of(key: str) -> Rule:
    """As many as another key of the answer lists."""
    return lambda value, answer, text: value == len(answer[key])


def at_most_lines(value: Any, answer: Mapping[str, Any], text: str) -> bool:
    """A count of lines that are there, or a number that stands on one."""
    return value <= sum(bool(line.strip()) for line in text.split("\n")) or _stand(value, answer, text)


def _stand(value: Any, answer: Mapping[str, Any], text: str) -> bool:
    """Each number of it stands in the text, within a range of processors, or in two parts with blanks between them."""
    words = {int(word) for word in re.findall("[0-9]{1,7}", text)}
    ranges = [(int(low), int(high)) for low, high in re.findall("([0-9]{1,6})-([0-9]{1,6})", text)]
    return all(
        int(number) in words
        or any(low <= int(number) <= high for low, high in ranges)
        or bool(re.search(r"\s+".join(number), text))
        or any(re.search(rf"\b{number[:cut]}\s+{number[cut:]}\b", text) for cut in range(1, len(number)))
        for number in re.findall("[0-9]+", str(value))
    )


def _ring_or_stands(value: Any, answer: Mapping[str, Any], text: str) -> bool:
    """Ranks: a number that stands there, or the last rank of a ring."""
    return _stand(value, answer, text) or _stand(value - 1, answer, text)


def _product(value: Any, answer: Mapping[str, Any], text: str) -> bool:
    """Cores of all sockets: a count of lines, or so many that the processors are a multiple."""
    return at_most_lines(value, answer, text) or answer["cpus"] % value == 0


def parts_of(value: Any, answer: Mapping[str, Any], text: str) -> bool:
    """Put together from words of the text: mlx5_0:1 Down/Disabled."""
    return all(part in text for part in re.split("[:/ ]", value))


def hexadecimal(value: Any, answer: Mapping[str, Any], text: str) -> bool:
    """A number that is printed with 0x and letters."""
    return value in {int(digits, 16) for digits in re.findall("0x([0-9a-fA-F]+)", text)}


def _lanes(value: Any, answer: Mapping[str, Any], text: str) -> bool:
    return float(value) == float(answer["lane_speed"].removesuffix("Gb")) * answer["width"]


def _digest(value: Any, answer: Mapping[str, Any], text: str) -> bool:
    return value == hashlib.sha1("\n".join(answer["expansion"]).encode()).hexdigest()


def across_blanks(value: Any, answer: Mapping[str, Any], text: str) -> bool:
    """A list that a wrapped terminal cut in two."""
    return str(value) in re.sub(r"\s", "", text)


# kind: key, at the top or below: how its values follow from the text.
def _leaf(value: Any, answer: Mapping[str, Any], text: str) -> bool:
    """A name that has a record, or as many names as one of the lists of nodes has."""
    if isinstance(value, str):
        return value in _names(text)
    return value in _lengths(text)


@lru_cache(maxsize=8)
def _names(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"(?i)(?:SwitchName=|switch: +)['\"]?([^\s'\"]+)", text))


@lru_cache(maxsize=8)
def _lengths(text: str) -> frozenset[int]:
    lists = re.findall(r"(?i)\bnodes(?:=|: +)(\S+)", text)
    return frozenset(length for names in lists if (length := _length(names)) is not None)


def _length(names: str) -> int | None:
    try:
        return len(expand_hostlist(names.strip("\"'")))
    except ToolkitError:
        return None


def _levels(value: Any, answer: Mapping[str, Any], text: str) -> bool:
    """A switch that is only named as a child makes a level, too."""
    return matches(r"(?i)\b(?:SwitchName=|switch: )")(value - 1, answer, text)


_RECORDS = {
    "switch_count": matches(r"(?i)\b(?:SwitchName=|switch: )"),
    "block_count": matches(r"(?i)\b(?:BlockName=|block: )"),
    "leaf_switches": _leaf, "levels": _levels, "node_count": FREE,
}  # fmt: skip
DERIVED: dict[str, dict[str, Rule]] = {
    "scontrol-show-topology": _RECORDS,
    "slurm-topology-conf": _RECORDS,
    "hostlist": {"expected": word("reject"), "count": length_of("expansion"), "expansion_sha1": _digest},
    "squeue": {"rows": matches(r"^.*\S")},
    "sinfo": {"rows": matches(r"^.*\S")},
    "lscpu": {
        **dict.fromkeys(("cpus", "sockets", "numa_nodes", "threads_per_core"), at_most_lines),
        "cores": _product, "node0_cpus": _stand, "node_cpus": _stand,
    },
    "numactl-H": {"cpus": _stand},
    "lstopo": dict.fromkeys(
        ("packages", "numa_nodes", "cores", "pus", "l3", "host_bridges", "pci", "groups", "osdevs", "memory_only_nodes"),
        at_most_lines,
    ),
    "sysfs": {"pci_devices": at_most_lines, "numa_node_minus_one": matches(r"/numa_node: ?-1$")},
    "nccl-topo-xml": {
        **{f"{name}_elements": matches(f"<{name} ") for name in ("gpu", "pci")},
        "pci_gpu_class": matches('class="0x030[02]'), "pci_ib_class": matches('class="0x0207'),
    },
    "nccl-log": {"nranks": _ring_or_stands},
    "nccl-tests": {
        "collective": word("all_reduce_perf", "all_gather_perf", "reduce_scatter_perf", "alltoall_perf", "broadcast_perf",
                           "reduce_perf"),
        "{}": word(*(f"{half}_{what}" for half in ("oop", "ip") for what in ("time_us", "algbw", "busbw", "wrong"))),
        "nranks": FREE, "nodes": matches(" Rank "), "result_rows": at_most_lines,
        "busbw_over_algbw_expected": FREE, "busbw_over_algbw_seen": FREE,
    },
    "nvidia-smi-topo-m": {
        "gpu_pair_link_counts": FREE, "gpu_link_summary": FREE, "nvlink_maximal_cliques": FREE,
        "nvlink_components": FREE,
        "gpu_count": length_of("gpu_cpu_affinity"), "nic_count": length_of("nic_columns"),
        "gpu_cpu_affinity": across_blanks, "gpu_numa_affinity": across_blanks,
    },
    "nvidia-smi-nvlink": {
        "gpu_count": length_of("gpus"), "active": matches(r"Link .*GB/s"), "speeds": matches(r"Link .*GB/s"),
        "inactive": matches("Link .*<inactive>"),
    },
    "nvidia-smi-q": {"gpu_blocks": length_of("bus_ids")},
    "nvidia-smi-query-gpu": {"gpu_count": matches(r"^.*\S")},
    "rocm-smi-showtopo": {"gpu_count": matches(r"GPU ?\[?[0-9]"), "link_summary": FREE},
    "ibstat": {
        "ca_count": matches(r"CA '"), "port_count": matches(r"Port [0-9]+:"), "active_ports": matches(r"State: Active"),
        "active_infiniband": parts_of, "active_ethernet": parts_of, "not_active": parts_of,
    },
    "ibstatus": {"port_count": matches(r"Infiniband device"), "active": matches(r"ACTIVE")},
    "ibv_devinfo": {"device_count": matches(r"hca_id:"), "active_ports": parts_of},
    "ibdev2netdev": {"rows": matches(r"==>")},
    "ibnetdiscover": {"switch_lines": matches(r"^\s*Switch"), "ca_lines": matches(r"^\s*Ca")},
    "opainfo": {"ports": matches(r"PortG"), "rate_gbps": _lanes, "lid": hexadecimal, "sm_lid": hexadecimal},
    "sacct": {"physical_lines": matches(r"^"), "columns": FREE, "rows_with_other_field_count": FREE},
}  # fmt: skip

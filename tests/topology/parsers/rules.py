"""What is known of each kind of output: wrong sidecars, warnings that are right, accidents that leave a valid text, and
how facts follow that do not stand in the text as they are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

Rule = Callable[[Any, Mapping[str, Any], str], bool]

# (kind, sample): {key: (the right value, why the sidecar is wrong)}.
WRONG: dict[tuple[str, str], dict[str, tuple[Any, str]]] = {
    ("lstopo", "007"): {"osdevs": (10, "ten lines OSDev are printed, and `Special depth -6: 10 OSDev` counts them")},
    ("nccl-tests", "013"): {"nodes": (None, "the rows say by their ratio how many ranks there are, nothing says where")},
}  # fmt: skip

# (kind, sample): what a right warning says of a text that is complete, and why.
WARNED: dict[tuple[str, str], tuple[str, str]] = {
    ("squeue", "001"): ("no header", "printed with --noheader"),
    ("sinfo", "001"): ("fields under", "one of its rows has a field more than the header"),
    ("nccl-tests", "009"): ("that of the rows", "its author took rows, columns and settings out"),
    ("ibstat", "007"): ("ibpanic", "the command ended so, behind whole adapters"),
    ("ibnetdiscover", "001"): ("no link", "a topology without links"),
    ("fi_info", "003"): ("without version", "its author shortened it"),
}  # fmt: skip

_ROWS = frozenset({"line dropped", "lines swapped"})
_COLUMNS = frozenset({"column swapped", "column lost"})
_IN_ROW = frozenset({"cells swapped"})
# kind: [(accidents, the lines that they must not touch, why the text is as valid as before)].
VALID: dict[str, list[tuple[frozenset[str], str, str]]] = {
    "nvidia-smi-query-gpu": [
        (_COLUMNS, r"^$", "fields may be asked for in any order and number"),
        (frozenset({"line dropped"}), r"^[a-z]|^0, ", "no line says how many GPUs there are"),
        (frozenset({"line duplicated"}), r"^[a-z]|, 0000|GPU-", "GPUs without an index may have equal rows"),
    ],
    "ibdev2netdev": [(frozenset({"line dropped"}), r"(?!)", "each line is a port, and none says how many there are")],
}


def leaves_valid_text(kind: str, name: str, touched: list[str]) -> bool:
    """Whether an accident that touched these lines leaves a text that the command might have printed."""
    return any(
        name in names and not any(re.search(not_these, line) for line in touched)
        for names, not_these, _ in VALID.get(kind, [])
    )


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
DERIVED: dict[str, dict[str, Rule]] = {
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

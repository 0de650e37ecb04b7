"""Read the XML that NCCL takes (`NCCL_TOPO_FILE`) and writes (`NCCL_TOPO_DUMP_FILE`): NUMA nodes, PCI tree, NICs, NVLinks.

Files of providers hold only the PCI tree, dumps also what NCCL found. The values are as written: NCCL, too, reads them
as words first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.xml_elements import Element, read_xml

KEYS = {
    "root": "the name of the element around all",
    "version": "its version of the format",
    "cpus": "each NUMA node in its order: numaid, arch, vendor, affinity (a mask of processors), as written; null where "
    "an attribute is missing or damaged",
    "gpu_elements": "how many elements `gpu` there are",
    "nets": "the names of all elements `net`, in their order",
    "net_speeds": "their speeds in Mbit/s, as written",
    "pci_elements": "how many elements `pci` there are, bridges and switches too",
    "pci_gpu_class": "how many of them have a class of GPUs, 0x0300 or 0x0302",
    "pci_ib_class": "how many of them have the class of InfiniBand, 0x0207",
    "nvlinks": "each element `nvlink` in its order: target, count, tclass, as written",
}
_ANY = re.compile(r".*")
_NUMBER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_REAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_HEX = re.compile(r"0x[0-9a-f]{1,16}", re.ASCII)
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", re.ASCII)
_CLASS = re.compile(r"0x[0-9a-f]{6}", re.ASCII)
_MASK = re.compile(r"[0-9a-f]{1,8}(,[0-9a-f]{8})*|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*|", re.ASCII)
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][\w.:+-]*", re.ASCII)
# Attributes that NCCL writes, by element: their form. Those of `_NEEDED` every file has.
_FORMS: dict[str, dict[str, re.Pattern[str]]] = {
    "system": {"version": _NUMBER, "id": _ANY},
    "cpu": {"numaid": _NUMBER, "affinity": _MASK, "arch": _WORD, "vendor": _WORD, "familyid": _NUMBER, "modelid": _NUMBER,
            "host_hash": _HEX},
    "pci": {"busid": _ADDRESS, "class": _CLASS, "vendor": _HEX, "device": _HEX, "subsystem_vendor": _HEX,
            "subsystem_device": _HEX, "link_speed": re.compile(r"|[0-9]+(\.[0-9]+)? GT/s( PCIe)?|Unknown( speed)?"),
            "link_width": _NUMBER},
    "gpu": {"dev": _NUMBER, "sm": _NUMBER, "rank": _NUMBER, "gdr": _NUMBER, "gcn": _ANY, "arch": _ANY},
    "nic": {},
    "net": {"name": _NAME, "dev": _NUMBER, "speed": _NUMBER, "port": _NUMBER, "latency": _REAL, "guid": _HEX,
            "maxconn": _NUMBER, "gdr": _NUMBER},
    "nvlink": {"target": _ADDRESS, "count": _NUMBER, "tclass": _CLASS},
    "xgmi": {"target": _ADDRESS, "count": _NUMBER, "tclass": _CLASS},
    "c2c": {"bw": _REAL, "count": _NUMBER},
}  # fmt: skip
_NEEDED = {
    "system": ("version",), "cpu": ("numaid", "affinity", "arch", "vendor", "familyid", "modelid"),
    "pci": ("busid", "class", "link_speed", "link_width"), "net": ("name", "speed", "port"),
    "nvlink": ("target", "count", "tclass"), "gpu": ("dev",),
}  # fmt: skip
_AROUND = {
    "cpu": ("system",), "pci": ("cpu", "pci"), "gpu": ("pci",), "nic": ("cpu", "pci"), "net": ("nic",), "nvlink": ("gpu",),
    "xgmi": ("gpu",), "c2c": ("gpu", "cpu"),
}  # fmt: skip


@dataclass(frozen=True)
class NcclTopology:
    """Elements by their names in the order of the file; of a damaged attribute the value is None.

    None instead of the elements where the text is no well-formed XML.
    """

    version: str | None
    elements: Mapping[str, tuple[Mapping[str, str | None], ...]] | None


def parse_nccl_topo_xml(text: str) -> tuple[NcclTopology, tuple[str, ...]]:
    """Read the whole file: (facts, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no topology of NCCL, or declares a DOCTYPE or entities.
    """
    warnings: list[str] = []
    document = read_xml(text.lstrip(), "a topology of NCCL", {}, warnings)
    if not document.elements or document.elements[0].name != "system":
        raise CheckFailedError("no topology of NCCL: no element `system`", where="line 1")
    read: dict[str, list[Mapping[str, str | None]]] = {name: [] for name in _FORMS}
    for element in document.elements:
        around = document.elements[element.parent].name if element.parent is not None else None
        if element.name not in _FORMS or (around is not None and around not in _AROUND.get(element.name, (around,))):
            warnings.append(f"line {element.line}: an element {element.name!r} in an element {around!r}")
        read.setdefault(element.name, []).append(_attributes(element, warnings))
    _name_repeats(document.elements, warnings)
    _name_unlike(document.elements, warnings)
    version = read["system"][0].get("version")
    whole = {name: tuple(entries) for name, entries in read.items()}
    return NcclTopology(version, whole if document.whole else None), tuple(warnings)


def _attributes(element: Element, warnings: list[str]) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    forms = _FORMS.get(element.name, {})
    for name in _NEEDED.get(element.name, ()):
        if name not in element.attributes:
            warnings.append(f"line {element.line}: {element.name} has no attribute {name}")
    for name, value in element.attributes.items():
        values[name] = value
        if name in forms and not forms[name].fullmatch(value):
            warnings.append(f"line {element.line}: {name} of {element.name} is {value[:60]!r}")
            values[name] = None
    return values


def _name_repeats(elements: tuple[Element, ...], warnings: list[str]) -> None:
    """A NUMA node, PCI address, GPU and link stands once."""
    keys: dict[str, Callable[[Element], Any]] = {
        "cpu": lambda e: (e.attributes.get("host_hash"), e.attributes.get("numaid")),
        "pci": lambda e: e.attributes.get("busid"),
        "gpu": lambda e: e.attributes.get("dev") and e.parent,
        "net": lambda e: (e.parent, e.attributes.get("name"), e.attributes.get("port"), e.attributes.get("dev")),
        "nvlink": lambda e: (e.parent, e.attributes.get("target")),
        "nic": lambda e: e.parent,
    }
    seen: dict[Any, int] = {}
    parents = {element.parent for element in elements}
    for place, element in enumerate(elements):
        if element.name not in keys:
            continue
        key = (element.name, keys[element.name](element))
        if key in seen:
            warnings.append(f"line {element.line}: the same {element.name} as in line {seen[key]}")
        seen.setdefault(key, element.line)
        inside = place in parents
        if element.name in ("nic", "cpu") and not inside:
            warnings.append(f"line {element.line}: {element.name} with nothing in it")
        if element.name == "pci" and not inside and element.attributes.get("class", "").startswith("0x0604"):
            warnings.append(f"line {element.line}: a bridge with nothing in it")


def _name_unlike(elements: tuple[Element, ...], warnings: list[str]) -> None:
    """Name GPUs without links where others have some, and devices whose neighbours at like places are more."""
    places: dict[int | None, list[Element]] = {}
    for element in elements:
        places.setdefault(element.parent, []).append(element)
    for name in ("cpu", "pci", "gpu"):
        shapes: dict[int, tuple[str, ...]] = {}
        for place, element in enumerate(elements):
            if element.name == name and (name != "pci" or element.attributes.get("class", "").startswith("0x0604")):
                inner = [
                    child.name + child.attributes.get("class", "")
                    for child in places.get(place, ())
                    if child.name != "nic"
                ]
                shapes[place] = tuple(sorted(inner))
        usual = max(shapes.values(), key=list(shapes.values()).count, default=())
        odd = [place for place, shape in shapes.items() if shape != usual]
        if 0 < len(odd) <= len(shapes) // 3:
            warnings.extend(
                f"line {elements[place].line}: this {name} has other things in it than most" for place in odd
            )
    _name_gaps([element.attributes for element in elements if element.name == "cpu"], elements[-1].line, warnings)
    devices = sorted(
        int(element.attributes["dev"])
        for element in elements
        if element.name == "gpu" and _NUMBER.fullmatch(element.attributes.get("dev", ""))
    )
    if devices and devices != list(range(len(devices))):
        warnings.append(f"line {elements[-1].line}: the numbers of the GPUs do not follow one another: {devices[:20]}")


def _name_gaps(cpus: Sequence[Mapping[str, str]], last: int, warnings: list[str]) -> None:
    """The NUMA nodes of one host count up from 0, and all are of one make; -1 stands for a host without NUMA."""
    numbers = [cpu.get("numaid", "") for cpu in cpus]
    one_host = not any("host_hash" in cpu for cpu in cpus)
    if one_host and numbers != ["-1"] and numbers != [str(number) for number in range(len(numbers))]:
        warnings.append(f"line {last}: the numbers of the NUMA nodes do not follow one another: {numbers[:20]}")
    if one_host and len({(cpu.get("arch"), cpu.get("vendor")) for cpu in cpus}) > 1:
        warnings.append(f"line {last}: the NUMA nodes are of several makes")
    if one_host and len({cpu.get("affinity", "").find(",") for cpu in cpus}) > 1:
        warnings.append(f"line {last}: the masks of the NUMA nodes have several lengths")


def answer_nccl_topo_xml(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of `KEYS` and warnings.

    Raises:
        CheckFailedError: it is no topology of NCCL, or declares a DOCTYPE or entities.
    """
    facts, warnings = parse_nccl_topo_xml(text)
    answer: dict[str, Any] = dict.fromkeys(KEYS)
    answer |= {"root": "system", "version": facts.version}
    if facts.elements is None:
        return answer, warnings
    found = facts.elements
    classes = [entry.get("class") for entry in found["pci"]]
    unknown = None in classes
    answer |= {
        "cpus": [{key: cpu.get(key) for key in ("numaid", "arch", "vendor", "affinity")} for cpu in found["cpu"]],
        "gpu_elements": len(found["gpu"]),
        "nets": [net.get("name") for net in found["net"]],
        "net_speeds": [net.get("speed") for net in found["net"]],
        "pci_elements": len(found["pci"]),
        "pci_gpu_class": None if unknown else sum(str(code)[:6] in ("0x0300", "0x0302") for code in classes),
        "pci_ib_class": None if unknown else sum(str(code)[:6] == "0x0207" for code in classes),
        "nvlinks": [{key: link.get(key) for key in ("target", "count", "tclass")} for link in found["nvlink"]],
    }
    return answer, warnings

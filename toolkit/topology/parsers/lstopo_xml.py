"""XML of `lstopo --of xml`, of hwloc 1 to 3: objects within objects, each with the set of its processors.

An object's set is made up of those of the objects in it, and that of a processing unit is its number: an object that is
lost, doubled or damaged is seen by that.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.lstopo_facts import MEMORY_ALONE, HostObjects, host_objects
from toolkit.topology.parsers.xml_elements import Document, Element, read_xml

_OTHER_NAMES = {"Socket": "Package", "Node": "NUMANode"}
_TYPES = frozenset({
    "System", "Machine", "Package", "NUMANode", "Group", "Die", "Cluster", "Core", "PU", "Bridge", "PCIDev", "OSDev",
    "Misc", "Cache", "L1Cache", "L2Cache", "L3Cache", "L4Cache", "L5Cache", "L1iCache", "L2iCache", "L3iCache", "MemCache",
})  # fmt: skip
_DEVICES = frozenset({"Bridge", "PCIDev", "OSDev", "Misc"})
_MEMORY = frozenset({"NUMANode", "MemCache"})
_WITH_SET = _TYPES - _DEVICES
_SET = re.compile(r"(?:0xf\.\.\.f,?)?(?:(?:0x[0-9a-f]{8})?(?:,(?:0x[0-9a-f]{8})?)*|0x[0-9a-f]{1,8}|0x0)", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)
_OWN = frozenset({"Package", "Core", "PU", "L3Cache", "Group"})


def read_topology_xml(text: str) -> tuple[HostObjects, list[str]]:
    """Read the whole file: (facts, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no topology of hwloc, or declares entities.
    """
    warnings: list[str] = []
    document = read_xml(text.lstrip(), "XML of lstopo", {"topology": "hwloc"}, warnings)
    elements = document.elements
    if not elements or elements[0].name not in ("topology", "root"):
        raise CheckFailedError("nothing that lstopo prints: no element `topology`", where="line 1")
    if not document.whole:
        return HostObjects(), warnings
    doubtful = _strange(document, warnings)
    doubtful |= _sets_that_do_not_fit(document, warnings)
    doubtful |= _nodes_that_are_lost(document, warnings)
    counts = Counter(_type_of(element) for element in elements if element.name == "object")
    counts["HostBridge"] = sum(
        element.name == "object" and element.attributes.get("bridge_type", "").startswith("0-") for element in elements
    )
    return host_objects(counts, doubtful, _memory_alone(document)), warnings


def _type_of(element: Element) -> str:
    name = element.attributes.get("type", "")
    if name == "Cache":  # hwloc 1
        kind = "i" if element.attributes.get("cache_type") == "2" else ""
        return f"L{element.attributes.get('depth', '')[:1]}{kind}Cache"
    return _OTHER_NAMES.get(name, name)


def _strange(document: Document, warnings: list[str]) -> set[str]:
    """Name elements and attributes that hwloc does not write; the types of which the number is then unknown."""
    doubtful: set[str] = set()
    seen: dict[tuple[str, str], int] = {}
    before = document.elements[0]
    for element in document.elements[1:]:
        attributes, parent = element.attributes, document.elements[element.parent or 0]
        if element.name == "info" and element == replace(before, line=element.line):
            warnings.append(f"line {element.line}: the same as the line above")
        before = element
        if element.name == "object" and parent.name not in ("object", "topology", "root"):
            warnings.append(f"line {element.line}: an object in an element {parent.name!r}")
        if element.name != "object":
            continue
        name = _type_of(element)
        if name not in _TYPES:
            warnings.append(f"line {element.line}: no type of hwloc: {name!r}")
            doubtful |= _TYPES
        elif name == "Bridge" and not re.fullmatch("[01]-[01]", attributes.get("bridge_type", "")):
            warnings.append(f"line {element.line}: a bridge without its type")
            doubtful.add(name)
        elif name in ("PU", "NUMANode") and not _NUMBER.fullmatch(attributes.get("os_index", "")):
            warnings.append(f"line {element.line}: {name} without its number")
            doubtful.add(name)
        keys = [(name, attributes[key]) for key in ("os_index",) if key in attributes and name in ("PU", "NUMANode")]
        keys += [(key, attributes[key]) for key in ("gp_index", "pci_busid") if key in attributes]
        for key in keys:
            if key in seen:
                warnings.append(f"line {element.line}: {key[0]} {key[1]!r} stands in line {seen[key]}, too")
                doubtful.add(name)
            seen[key] = element.line
    return doubtful


def _sets_that_do_not_fit(document: Document, warnings: list[str]) -> set[str]:
    """Compare each object's set of processors with those in it; the types of which the number is then unknown."""
    doubtful: set[str] = set()
    parts: defaultdict[int, list[int]] = defaultdict(list)
    sets: dict[int, int] = {}
    # Memory is beside the tree of processors; in hwloc 1 a NUMA node is a part of the tree.
    around_others = {element.parent for element in document.elements if _type_of(element) in _WITH_SET - _MEMORY}
    for place, element in enumerate(document.elements):
        name = _type_of(element)
        if element.name != "object" or name not in _WITH_SET:
            continue
        bits = _bits(element.attributes.get("cpuset", ""))
        if bits is None:
            warnings.append(f"line {element.line}: {name} without its set of processors")
            doubtful |= _OWN
            continue
        sets[place] = bits
        if name == "PU" and bits and bits != 1 << int(element.attributes.get("os_index", "0")[:5] or 0):
            warnings.append(f"line {element.line}: the set of this PU is not its number")
            doubtful |= _OWN
        if name in _MEMORY and place not in around_others:
            around = sets.get(element.parent or 0)
            if around is not None and bits & ~around:
                warnings.append(f"line {element.line}: the set of this {name} is not in that of the object around it")
                doubtful.add(name)
        elif element.parent is not None:
            parts[element.parent].append(bits)
    for place, bits in sets.items():
        element = document.elements[place]
        inner = parts.get(place, [])
        joined = sum(inner) if all(inner) else -1
        leaf = _type_of(element) == "PU" or (_type_of(element) in _MEMORY and place not in around_others)
        if not leaf and bits and (joined != bits or _overlap(inner)):
            warnings.append(f"line {element.line}: the set of this {_type_of(element)} is not made up of those in it")
            doubtful |= _OWN
    return doubtful


def _nodes_that_are_lost(document: Document, warnings: list[str]) -> set[str]:
    """Compare the machine's set of NUMA nodes with those that are printed."""
    objects = [element for element in document.elements if element.name == "object"]
    if not objects or "nodeset" not in objects[0].attributes:
        return set()
    numbers = [element.attributes.get("os_index", "") for element in objects if _type_of(element) == "NUMANode"]
    found = sum(1 << int(number) for number in set(numbers) if re.fullmatch("[0-9]{1,5}", number))
    if _bits(objects[0].attributes["nodeset"]) == found:
        return set()
    warnings.append(f"line {objects[0].line}: the machine's set of NUMA nodes is not made up of those in it")
    return {"NUMANode"}


def _overlap(sets: list[int]) -> bool:
    joined = 0
    for bits in sets:
        if joined & bits:
            return True
        joined |= bits
    return False


def _bits(text: str) -> int | None:
    """A set in hwloc's form, "0x00000001,,0xffffffff"; None where it is none."""
    if not text or not _SET.fullmatch(text) or "..." in text:
        return None
    return sum(int(word, 16) << (32 * place) for place, word in enumerate(reversed(text.split(","))) if word)


def _memory_alone(document: Document) -> int:
    """NUMA nodes beyond the first at a place, and those of devices."""
    places: Counter[int] = Counter()
    alone = 0
    for element in document.elements:
        if element.name == "object" and _type_of(element) == "NUMANode":
            parent = element.parent or 0
            alone += bool(places[parent]) or element.attributes.get("subtype") in MEMORY_ALONE
            places[parent] += 1
    return alone

"""The one JSON form of a topology: of a node that shows itself, of a job's merged nodes, and of a file with several.

Kinds of nodes stand once, below `hardware`, and nodes name theirs; docs/topology.md has the keys. A file may hold many
such objects one after another, as `srun toolkit topo show --json` prints them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from toolkit.errors import ToolkitError
from toolkit.topology.facts import Fact, Hardware, NodeFacts, Topology, contradictions
from toolkit.topology.merging import in_order_of_names, merge_nodes
from toolkit.topology.readers.topology_address import SwitchPath

FORM = 1  # the version of what is written here


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node as it is written: its hardware by name."""

    host: Fact[str]
    switches: Fact[SwitchPath]
    hardware: str
    gpu_uuids: tuple[Fact[str], ...]
    gpu_fabrics: tuple[Fact[str], ...]
    nic_guids: tuple[Fact[str], ...]
    warnings: tuple[str, ...]

    def facts(self, hardware: Hardware) -> NodeFacts:
        """The node itself."""
        return NodeFacts(
            self.host, self.switches, hardware, self.gpu_uuids, self.gpu_fabrics, self.nic_guids, self.warnings
        )


@dataclass(frozen=True, slots=True)
class TopologyRecord:
    """A topology as it is written."""

    topology: int
    hardware: Mapping[str, Hardware]
    nodes: tuple[NodeRecord, ...]
    ranks_by_host: Mapping[str, tuple[int, ...]]
    unplaced_ranks: tuple[int, ...]
    conflicts: tuple[str, ...]
    gpu_of_rank: Mapping[int, str] = field(default_factory=dict)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Reader and writer of a type; making one takes milliseconds."""
    return TypeAdapter(kind)


def hardware_text(hardware: Hardware) -> tuple[str, bytes]:
    """(name, JSON) of a kind of node; equal kinds have equal names."""
    text = adapter(Hardware).dump_json(hardware, exclude_defaults=True)
    return hashlib.sha256(text).hexdigest()[:16], text


def record_of(node: NodeFacts, hardware: str) -> NodeRecord:
    """A node as it is written, with the name of its hardware."""
    return NodeRecord(
        node.host, node.switches, hardware, node.gpu_uuids, node.gpu_fabrics, node.nic_guids, node.warnings
    )


def topology_as_json(topology: Topology) -> dict[str, Any]:
    """The object that is printed and read again; `contradictions` are said for readers, by host."""
    names: dict[int, str] = {}
    kinds: dict[str, Any] = {}
    for node in topology.nodes:
        if id(node.hardware) not in names:
            name, text = hardware_text(node.hardware)
            names[id(node.hardware)] = name
            kinds[name] = json.loads(text)
    nodes = [record_of(node, names[id(node.hardware)]) for node in topology.nodes]
    return {
        "topology": FORM,
        "hardware": kinds,
        "nodes": adapter(list[NodeRecord]).dump_python(nodes, mode="json", exclude_defaults=True),
        "ranks_by_host": {host: list(ranks) for host, ranks in topology.ranks_by_host.items()},
        "unplaced_ranks": list(topology.unplaced_ranks),
        "gpu_of_rank": {str(rank): uuid for rank, uuid in topology.gpu_of_rank.items()},
        "conflicts": list(topology.conflicts),
        "contradictions": {
            node.host.value or "": list(said) for node in topology.nodes if (said := contradictions(node))
        },
    }


def topology_of_node(node: NodeFacts) -> Topology:
    """One node alone, without ranks."""
    return Topology((node,), {})


def read_topology(text: str, where: str) -> Topology:
    """The topology that a text holds: one object, or many of nodes that are put together in any order.

    Raises:
        ToolkitError: it is no such text; `where` names it.
    """
    found = [_topology(body, f"{where}: object {number}") for number, body in enumerate(_objects(text, where), 1)]
    return found[0] if len(found) == 1 else _put_together(found)


def _objects(text: str, where: str) -> list[Any]:
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < (end := len(text)) and (at := end - len(text[at:].lstrip())) < end:
        try:
            body, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            stopped = getattr(error, "pos", at)
            line = text.count("\n", 0, stopped) + 1
            left = text[stopped : stopped + 60].splitlines() or [""]
            raise _no_facts(f"no JSON: {left[0]!r}", f"{where}: line {line}") from error
        found.append(body)
    if not found:
        raise _no_facts("nothing stands in it", where)
    return found


def _topology(body: Any, where: str) -> Topology:
    if not isinstance(body, dict) or body.get("topology") != FORM:
        raise _no_facts(f"no topology of form {FORM}", where)
    try:
        record = adapter(TopologyRecord).validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise _no_facts(first["msg"], f"{where}: {'.'.join(map(str, first['loc']))}") from error
    for number, node in enumerate(record.nodes):
        if node.hardware not in record.hardware:
            raise _no_facts(f"no hardware has the name {node.hardware[:60]!r}", f"{where}: nodes.{number}.hardware")
        kind = record.hardware[node.hardware]
        if not len(kind.gpus) == len(node.gpu_uuids) == len(node.gpu_fabrics):
            raise _no_facts(
                f"the node has not as many UUIDs and fabrics as GPUs, {len(kind.gpus)}", f"{where}: nodes.{number}"
            )
    nodes = tuple(node.facts(record.hardware[node.hardware]) for node in record.nodes)
    return Topology(nodes, record.ranks_by_host, record.unplaced_ranks, record.conflicts, record.gpu_of_rank)


def _no_facts(message: str, where: str) -> ToolkitError:
    return ToolkitError(message, where=where, fix="give what `toolkit topo show --json` printed on each node")


def _put_together(found: Sequence[Topology]) -> Topology:
    nodes, conflicts = merge_nodes(node for topology in found for node in topology.nodes)
    told = [line for topology in found for line in topology.conflicts]
    if any(topology.ranks_by_host for topology in found):
        told.append("ranks are left out: they are known only of a topology that was gathered as one")
    return Topology(in_order_of_names(nodes), {}, (), tuple(sorted({*told, *conflicts})))


def write_topology(topology: Topology) -> str:
    """The object as text, a node a line, so that many can stand in one file."""
    return json.dumps(topology_as_json(topology))

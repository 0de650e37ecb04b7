"""Reads and writes a topology as JSON; docs/topology.md documents the keys.

The object contains each kind of node once, below `hardware`, and nodes refer to it by name. A file may contain several
objects in sequence, as `srun toolkit topo show --json` prints them.
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

FORM = 1  # the version of the format


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node in JSON, with the name of its hardware."""

    host: Fact[str]
    switches: Fact[SwitchPath]
    hardware: str
    gpu_uuids: tuple[Fact[str], ...]
    gpu_fabrics: tuple[Fact[str], ...]
    nic_guids: tuple[Fact[str], ...]
    warnings: tuple[str, ...]

    def facts(self, hardware: Hardware) -> NodeFacts:
        """The facts of the node."""
        return NodeFacts(
            self.host, self.switches, hardware, self.gpu_uuids, self.gpu_fabrics, self.nic_guids, self.warnings
        )


@dataclass(frozen=True, slots=True)
class TopologyRecord:
    """A topology in JSON."""

    topology: int
    hardware: Mapping[str, Hardware]
    nodes: tuple[NodeRecord, ...]
    ranks_by_host: Mapping[str, tuple[int, ...]]
    unplaced_ranks: tuple[int, ...]
    conflicts: tuple[str, ...]
    gpu_of_rank: Mapping[int, str] = field(default_factory=dict)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """The cached reader and writer of a type; building one takes milliseconds."""
    return TypeAdapter(kind)


def hardware_text(hardware: Hardware) -> tuple[str, bytes]:
    """(name, JSON) of a kind of node; the name is a digest of the JSON."""
    text = adapter(Hardware).dump_json(hardware, exclude_defaults=True)
    return hashlib.sha256(text).hexdigest()[:16], text


def record_of(node: NodeFacts, hardware: str) -> NodeRecord:
    """A node in JSON, with the name of its hardware."""
    return NodeRecord(
        node.host, node.switches, hardware, node.gpu_uuids, node.gpu_fabrics, node.nic_guids, node.warnings
    )


def topology_as_json(topology: Topology) -> dict[str, Any]:
    """The JSON object of a topology; `read_topology` ignores its `contradictions`."""
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
            node.host.value or "": list(lines) for node in topology.nodes if (lines := contradictions(node))
        },
    }


def topology_of_node(node: NodeFacts) -> Topology:
    """A topology of one node, without ranks."""
    return Topology((node,), {})


def read_topology(text: str, where: str) -> Topology:
    """The topology in `text`: one object, or several in any order that are merged.

    Raises:
        ToolkitError: `text` is not a valid topology; `where` names its source.
    """
    topologies = [_topology(body, f"{where}: object {number}") for number, body in enumerate(_objects(text, where), 1)]
    return topologies[0] if len(topologies) == 1 else _merge(topologies)


def _objects(text: str, where: str) -> list[Any]:
    decoder, bodies, at = json.JSONDecoder(), [], 0
    while at < (end := len(text)) and (at := end - len(text[at:].lstrip())) < end:
        try:
            body, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            stopped = getattr(error, "pos", at)
            line = text.count("\n", 0, stopped) + 1
            left = text[stopped : stopped + 60].splitlines() or [""]
            raise _invalid(f"expected JSON, got {left[0]!r}", f"{where}: line {line}") from error
        bodies.append(body)
    if not bodies:
        raise _invalid("expected JSON, got no data", where)
    return bodies


def _topology(body: Any, where: str) -> Topology:
    if not isinstance(body, dict) or body.get("topology") != FORM:
        raise _invalid(f"expected a topology of version {FORM}", where)
    try:
        record = adapter(TopologyRecord).validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise _invalid(first["msg"], f"{where}: {'.'.join(map(str, first['loc']))}") from error
    for number, node in enumerate(record.nodes):
        if node.hardware not in record.hardware:
            raise _invalid(f"unknown hardware {node.hardware[:60]!r}", f"{where}: nodes.{number}.hardware")
        kind = record.hardware[node.hardware]
        if not len(kind.gpus) == len(node.gpu_uuids) == len(node.gpu_fabrics):
            raise _invalid(f"expected {len(kind.gpus)} UUIDs and fabrics, as many as GPUs", f"{where}: nodes.{number}")
    nodes = tuple(node.facts(record.hardware[node.hardware]) for node in record.nodes)
    return Topology(nodes, record.ranks_by_host, record.unplaced_ranks, record.conflicts, record.gpu_of_rank)


def _invalid(message: str, where: str) -> ToolkitError:
    return ToolkitError(message, where=where, fix="give the output of `toolkit topo show --json` on each node")


def _merge(topologies: Sequence[Topology]) -> Topology:
    nodes, conflicts = merge_nodes(node for topology in topologies for node in topology.nodes)
    lines = [line for topology in topologies for line in topology.conflicts]
    if any(topology.ranks_by_host for topology in topologies):
        lines.append("ranks are omitted: only a topology that a job gathered as a whole has them")
    return Topology(in_order_of_names(nodes), {}, (), tuple(sorted({*lines, *conflicts})))


def write_topology(topology: Topology) -> str:
    """The object as one line of JSON, so that a file can contain several."""
    return json.dumps(topology_as_json(topology))

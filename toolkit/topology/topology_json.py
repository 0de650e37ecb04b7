"""Read and write topologies as JSON, of a single node or of all nodes of a job.

`hardware` contains each kind of node once, and each node names its kind; docs/topology.md lists the keys. A file may
contain several such objects, as `srun toolkit topo show --json` prints them.
"""

import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from toolkit.errors import ToolkitError
from toolkit.topology.facts import Fact, Hardware, NodeFacts, Topology, contradictions
from toolkit.topology.merging import in_order_of_names, merge_nodes
from toolkit.topology.readers.topology_address import SwitchPath

__all__ = [
    "NodeRecord", "adapter", "hardware_json", "read_topology", "record_of", "topology_as_json", "topology_of_node",
    "write_topology",
]  # fmt: skip

FORM = 1  # the version of this JSON form


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The JSON form of a node, which refers to its hardware by name."""

    host: Fact[str]
    switches: Fact[SwitchPath]
    hardware: str
    gpu_uuids: tuple[Fact[str], ...]
    gpu_fabrics: tuple[Fact[str], ...]
    nic_guids: tuple[Fact[str], ...]
    warnings: tuple[str, ...]

    def facts(self, hardware: Hardware) -> NodeFacts:
        """Return the facts of this node, given its hardware."""
        return NodeFacts(
            self.host, self.switches, hardware, self.gpu_uuids, self.gpu_fabrics, self.nic_guids, self.warnings
        )


@dataclass(frozen=True, slots=True)
class TopologyRecord:
    """The JSON form of a topology."""

    topology: int
    hardware: Mapping[str, Hardware]
    nodes: tuple[NodeRecord, ...]
    ranks_by_host: Mapping[str, tuple[int, ...]]
    unplaced_ranks: tuple[int, ...]
    conflicts: tuple[str, ...]
    gpu_of_rank: Mapping[int, str] = field(default_factory=dict)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the JSON parser and serializer for a type."""  # cached, since creating an adapter takes milliseconds
    return TypeAdapter(kind)


def hardware_json(hardware: Hardware) -> tuple[str, bytes]:
    """Return (name, JSON) for a kind of node; equal kinds have equal names."""
    encoded = adapter(Hardware).dump_json(hardware, exclude_defaults=True)
    return hashlib.sha256(encoded).hexdigest()[:16], encoded


def record_of(node: NodeFacts, hardware: str) -> NodeRecord:
    """Return the JSON form of a node; `hardware` is the name of its hardware."""
    return NodeRecord(
        node.host, node.switches, hardware, node.gpu_uuids, node.gpu_fabrics, node.nic_guids, node.warnings
    )


def topology_as_json(topology: Topology) -> dict[str, Any]:
    """Return the JSON object for a topology. `contradictions` is only for display; `read_topology` ignores it."""
    names: dict[int, str] = {}
    kinds: dict[str, Any] = {}
    for node in topology.nodes:
        if id(node.hardware) not in names:
            name, encoded = hardware_json(node.hardware)
            names[id(node.hardware)] = name
            kinds[name] = json.loads(encoded)
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
    """Return a topology with one node and without ranks."""
    return Topology((node,), {})


def read_topology(text: str, where: str) -> Topology:
    """Parse a topology from one JSON object, or from several, which are merged independent of their order.

    Raises:
        ToolkitError: `text` is not a valid topology; `where` names its source.
    """
    topologies = [_topology(body, f"{where}: object {number}") for number, body in enumerate(_objects(text, where), 1)]
    return topologies[0] if len(topologies) == 1 else _merge(topologies)


def _objects(text: str, where: str) -> list[Any]:
    """Return the JSON values in `text`, which are separated only by whitespace."""
    decoder, bodies, at = json.JSONDecoder(), [], 0
    while at < (end := len(text)) and (at := end - len(text[at:].lstrip())) < end:
        try:
            body, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            stopped = getattr(error, "pos", at)
            line = text.count("\n", 0, stopped) + 1
            rest = text[stopped : stopped + 60].splitlines() or [""]
            raise _invalid(f"expected JSON, got {rest[0]!r}", f"{where}: line {line}") from error
        bodies.append(body)
    if not bodies:
        raise _invalid("expected a topology in JSON, got an empty file", where)
    return bodies


def _topology(body: Any, where: str) -> Topology:
    if not isinstance(body, dict) or body.get("topology") != FORM:
        raise _invalid(f"expected a JSON object with topology = {FORM}, got {_form(body)}", where)
    try:
        record = adapter(TopologyRecord).validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise _invalid(first["msg"], f"{where}: {'.'.join(map(str, first['loc']))}") from error
    for number, node in enumerate(record.nodes):
        if node.hardware not in record.hardware:
            raise _invalid(
                f"expected a name in `hardware`, got {node.hardware[:60]!r}", f"{where}: nodes.{number}.hardware"
            )
        kind = record.hardware[node.hardware]
        if not len(kind.gpus) == len(node.gpu_uuids) == len(node.gpu_fabrics):
            raise _invalid(
                f"expected a UUID and a fabric for each of {len(kind.gpus)} GPUs, "
                f"got {len(node.gpu_uuids)} UUIDs and {len(node.gpu_fabrics)} fabrics",
                f"{where}: nodes.{number}",
            )
    nodes = tuple(node.facts(record.hardware[node.hardware]) for node in record.nodes)
    return Topology(nodes, record.ranks_by_host, record.unplaced_ranks, record.conflicts, record.gpu_of_rank)


def _form(body: Any) -> str:
    if not isinstance(body, dict):
        return reprlib.repr(body)
    return f"topology = {reprlib.repr(body['topology'])}" if "topology" in body else "an object without that key"


def _invalid(message: str, where: str) -> ToolkitError:
    return ToolkitError(message, where=where, fix="pass the output of `toolkit topo show --json` from each node")


def _merge(topologies: Sequence[Topology]) -> Topology:
    nodes, conflicts = merge_nodes(node for topology in topologies for node in topology.nodes)
    lines = [line for topology in topologies for line in topology.conflicts]
    if any(topology.ranks_by_host for topology in topologies):
        lines.append("ranks are omitted, because toolkit can read them only from a single object")
    return Topology(in_order_of_names(nodes), {}, (), tuple(sorted({*lines, *conflicts})))


def write_topology(topology: Topology) -> str:
    """Return the JSON object on one line, so that a file can contain several objects."""
    return json.dumps(topology_as_json(topology))

"""The adapters in a file of facts that `toolkit topo show --json` wrote, on this node or others."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.topology.facts import NicPort, NodeFacts
from toolkit.topology.nccl.node import AdapterPort
from toolkit.topology.topology_json import read_topology


def read_facts_file(path: Path) -> tuple[AdapterPort, ...]:
    """The ports of the adapters of all nodes, those of one name and number once.

    Raises:
        ToolkitError: the file cannot be read, is no such file, or says that the adapters are unknown.
    """
    fix = "give what `toolkit topo show --json` printed on a compute node"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ToolkitError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from error
    except UnicodeDecodeError as error:
        raise ToolkitError("is no text", where=str(path), fix=fix) from error
    found: dict[tuple[str, int], AdapterPort] = {}
    for node in read_topology(text, str(path)).nodes:
        for port in _ports(node, str(path), fix):
            found.setdefault((port.adapter, port.port), port)
    return tuple(found.values())


def _ports(node: NodeFacts, where: str, fix: str) -> list[AdapterPort]:
    nics = node.hardware.nics
    if nics.value is None:
        raise ToolkitError(f"the adapters are unknown there: {nics.missing[:200]}", where=where, fix=fix)
    return [_port(nic.name, port) for nic in nics.value for port in nic.ports]


def _port(adapter: str, port: NicPort) -> AdapterPort:
    state = port.state.value
    active = None if state is None else state.casefold() == "active"
    return AdapterPort(adapter, port.number, active, port.rate_gbit_per_s.value, port.link_layer.value)

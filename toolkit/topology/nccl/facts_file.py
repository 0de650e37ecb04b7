"""Reads the adapter ports in a file that `toolkit topo show --json` wrote."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.topology.facts import NicPort, NodeFacts
from toolkit.topology.nccl.node import AdapterPort
from toolkit.topology.topology_json import read_topology


def read_facts_file(path: Path) -> tuple[AdapterPort, ...]:
    """The adapter ports of all nodes, once for each adapter name and port number.

    Raises:
        ToolkitError: the file is not readable or valid, or the adapters of a node are unknown.
    """
    fix = "give the output of `toolkit topo show --json` on a compute node"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ToolkitError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from error
    except UnicodeDecodeError as error:
        raise ToolkitError("expected JSON in UTF-8", where=str(path), fix=fix) from error
    ports: dict[tuple[str, int], AdapterPort] = {}
    for node in read_topology(text, str(path)).nodes:
        for port in _ports(node, str(path), fix):
            ports.setdefault((port.adapter, port.port), port)
    return tuple(ports.values())


def _ports(node: NodeFacts, where: str, fix: str) -> list[AdapterPort]:
    nics = node.hardware.nics
    if nics.value is None:
        raise ToolkitError(f"the adapters are unknown in this file: {nics.missing[:200]}", where=where, fix=fix)
    return [_port(nic.name, port) for nic in nics.value for port in nic.ports]


def _port(adapter: str, port: NicPort) -> AdapterPort:
    state = port.state.value
    is_active = None if state is None else state.casefold() == "active"
    return AdapterPort(adapter, port.number, is_active, port.rate_gbit_per_s.value, port.link_layer.value)

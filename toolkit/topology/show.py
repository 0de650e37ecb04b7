"""A node's facts as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from toolkit.topology import links
from toolkit.topology.facts import Fact, NodeFacts
from toolkit.topology.parsers.ibstat import Adapter
from toolkit.topology.parsers.nvidia_smi_topo import LinkMatrix
from toolkit.topology.parsers.topology_address import SwitchPath

T = TypeVar("T")


def facts_as_json(facts: NodeFacts) -> str:
    """One JSON object; every fact is {"value": ..., "source": ..., "missing": ...}, unknown values are null."""
    return json.dumps(asdict(facts), indent=2)


def facts_as_lines(facts: NodeFacts) -> list[str]:
    """One line a fact and one a GPU or port, each fact with its source."""
    return [
        *_fact("host", facts.host, lambda host: [host]),
        *_fact("switches", facts.switches, _switch_lines),
        *_fact("GPUs", facts.gpu_links, _gpu_lines),
        *_fact("adapters", facts.adapters, _adapter_lines),
    ]


def _fact(name: str, fact: Fact[T], render: Callable[[T], list[str]]) -> list[str]:
    if fact.value is None:
        return [f"{name}: unknown, {fact.missing}  [{fact.source}]"]
    first, *rest = render(fact.value)
    return [f"{name}: {first}  [{fact.source}]", *(f"  {line}" for line in rest)]


def _switch_lines(path: SwitchPath) -> list[str]:
    return [" > ".join((*path.levels, path.node))]


def _gpu_lines(matrix: LinkMatrix) -> list[str]:
    nearest = {found.gpu: f"{', '.join(found.nics)} ({found.level})" for found in links.nearest_nics(matrix)}
    lines = [f"{len(matrix.gpus)}, {links.summary(matrix)}"]
    for gpu, cpus, numa in zip(matrix.gpus, matrix.cpu_affinity, matrix.numa_affinity, strict=True):
        lines.append(
            f"{gpu}: CPUs {cpus or 'unknown'}, NUMA {numa or 'unknown'}, nearest NIC {nearest.get(gpu, 'unknown')}"
        )
    return lines


def _adapter_lines(adapters: tuple[Adapter, ...]) -> list[str]:
    lines = [str(len(adapters))]
    for adapter in adapters:
        for port in adapter.ports:
            rate = "unknown" if port.rate_gb_per_s is None else f"{port.rate_gb_per_s:g} Gbit/s"
            state = f"{port.state or 'unknown'}/{port.physical_state or 'unknown'}"
            lines.append(f"{adapter.name}:{port.number}: {state}, {rate}, {port.link_layer or 'unknown'}")
    return lines

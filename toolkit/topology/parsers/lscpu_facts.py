"""What `lscpu` tells of a host, whichever of its forms was printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Processors:
    """Counts are None where the text does not tell; `node_cpus` has None for a node whose line is damaged."""

    cpus: int | None = None
    sockets: int | None = None
    cores: int | None = None
    threads_per_core: int | None = None
    numa_nodes: int | None = None
    node_cpus: Mapping[int, tuple[int, ...] | None] | None = None

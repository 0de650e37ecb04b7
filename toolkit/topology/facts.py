"""Facts about nodes, each with its source. What is not known is None and says why; it is never a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from toolkit.topology.parsers.ibstat import Adapter
from toolkit.topology.parsers.nvidia_smi_topo import LinkMatrix
from toolkit.topology.parsers.topology_address import SwitchPath

T = TypeVar("T")


@dataclass(frozen=True)
class Fact(Generic[T]):
    """One thing that is known, or the reason why it is not.

    `source` names the command or variable that was asked. `missing` is empty exactly when `value` is not None.
    """

    value: T | None
    source: str
    missing: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """What one node says of itself.

    `warnings` tell of damaged lines in what the sources printed, each with its source and line.
    """

    host: Fact[str]
    switches: Fact[SwitchPath]
    gpu_links: Fact[LinkMatrix]
    adapters: Fact[tuple[Adapter, ...]]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs: `host` is None when unknown, `node` is the launcher's number of the node."""

    rank: int
    host: str | None
    node: int
    local_rank: int


@dataclass(frozen=True)
class Topology:
    """The facts of all nodes, the same on every rank.

    `nodes` and `ranks_by_host` are ordered by the lowest rank on the node, ranks ascending. Ranks whose host is
    unknown stand in `unplaced_ranks`. `conflicts` tell where sources contradict each other.
    """

    nodes: tuple[NodeFacts, ...]
    ranks_by_host: Mapping[str, tuple[int, ...]]
    unplaced_ranks: tuple[int, ...] = ()
    conflicts: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(len(ranks) for ranks in self.ranks_by_host.values()) + len(self.unplaced_ranks)

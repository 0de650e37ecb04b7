"""Bring the facts of all nodes to all ranks. Exchanged as JSON; torch is imported only to exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from toolkit.topology.facts import Fact, NodeFacts, RankPlace, Topology
from toolkit.topology.probe import probe_node
from toolkit.world.facts import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Contribution:
    """What one rank tells the others: its place, and its node's facts when it is the one that asked."""

    place: RankPlace
    facts: NodeFacts | None


def gather_topology(world: World, group: ProcessGroup | None = None) -> Topology:
    """Probe every node once, by its local rank 0, and return the same topology on every rank.

    Collective over `group` (None: all ranks), whose backend must carry CPU tensors.
    """
    place = RankPlace(world.rank, world.host or None, world.node, world.local_rank)
    host = Fact(world.host or None, world.discovered_by, "" if world.host else "the launcher gave no host name")
    facts = probe_node(host) if world.local_rank == 0 else None
    encoding = TypeAdapter(Contribution)
    texts = _all_gather_bytes(encoding.dump_json(Contribution(place, facts)), group)
    return merge([encoding.validate_json(text) for text in texts])


def merge(contributions: Sequence[Contribution]) -> Topology:
    """Merge what the ranks told; the result does not depend on the order of `contributions`."""
    ordered = sorted(contributions, key=lambda contribution: contribution.place.rank)
    ranks_by_host: dict[str, list[int]] = {}
    numbers_by_host: dict[str, set[int]] = {}
    hosts_by_number: dict[int, set[str]] = {}
    facts_by_host: dict[str, NodeFacts] = {}
    conflicts = []
    for contribution in ordered:
        place = contribution.place
        if place.host is None:
            continue
        ranks_by_host.setdefault(place.host, []).append(place.rank)
        numbers_by_host.setdefault(place.host, set()).add(place.node)
        hosts_by_number.setdefault(place.node, set()).add(place.host)
        if contribution.facts and facts_by_host.setdefault(place.host, contribution.facts) is not contribution.facts:
            conflicts.append(f"two ranks on {place.host} are local rank 0")
    # Equal names of different machines ("localhost") show here: the launcher counted them apart.
    conflicts += [
        f"ranks on host {host} count themselves to nodes {sorted(numbers)}"
        for host, numbers in numbers_by_host.items()
        if len(numbers) > 1
    ]
    conflicts += [
        f"node {number} has several host names, {sorted(hosts)}"
        for number, hosts in hosts_by_number.items()
        if len(hosts) > 1
    ]
    return Topology(
        nodes=tuple(facts_by_host[host] for host in ranks_by_host if host in facts_by_host),
        ranks_by_host={host: tuple(ranks) for host, ranks in ranks_by_host.items()},
        unplaced_ranks=tuple(c.place.rank for c in ordered if c.place.host is None),
        conflicts=tuple(conflicts),
    )


def _all_gather_bytes(data: bytes, group: ProcessGroup | None) -> list[bytes]:
    import torch
    import torch.distributed as dist

    size = dist.get_world_size(group)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(data.ljust(longest, b" ")), dtype=torch.uint8)
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    return [bytes(part[: int(length)].tolist()) for part, length in zip(gathered, lengths, strict=True)]

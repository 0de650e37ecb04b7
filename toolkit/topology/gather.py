"""Bring the facts of all nodes to all ranks, over the process group or a store; torch is imported only to exchange.

What a kind of node has in common is sent once, by the first rank that has it: a large job's nodes are alike, and differ
in their names, leaves and the numbers of single devices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.topology.facts import Fact, Hardware, NodeFacts, RankPlace, Topology, unknown
from toolkit.topology.merging import merge_nodes
from toolkit.topology.probe import probe_node
from toolkit.topology.topology_json import NodeRecord, adapter, hardware_text, read_topology, record_of, write_topology
from toolkit.world.facts import World
from toolkit.world.physical_gpu import gpu_of_device, gpus_of_process

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store


@dataclass(frozen=True)
class Contribution:
    """What one rank tells the others: its place, and its node's facts when it is the one that asked."""

    place: RankPlace
    facts: NodeFacts | None


@dataclass(frozen=True, slots=True)
class Told:
    """A contribution as it is sent: the node's hardware by name, with the length of its own text."""

    place: RankPlace
    node: NodeRecord | None
    hardware_bytes: int


def gather_topology(world: World, group: ProcessGroup | None = None) -> Topology:
    """Probe every node once, by its local rank 0, and return the same topology on every rank.

    Collective over `group` (None: all ranks), whose backend must carry CPU tensors.
    """
    text, name, hardware = encode(contribution_of(world))
    texts = _all_gather_bytes(text, group)
    told = [adapter(Told).validate_json(one) for one in texts]
    kinds: dict[str, bytes] = {}
    for sender, one in enumerate(told):
        if one.node is not None and one.node.hardware not in kinds:
            own = hardware if one.node.hardware == name else b" " * one.hardware_bytes
            kinds[one.node.hardware] = _broadcast_bytes(own, sender, group)
    return merge(decode(told, kinds))


def gather_over_store(world: World, store: Store, prefix: str = "topology") -> Topology:
    """The same over a store of torch, before there is a process group, or without one.

    Collective over all ranks of `world`; rank 0 puts the nodes together, the others wait for it as long as the store
    does. A `prefix` serves once.
    """
    text, name, hardware = encode(contribution_of(world))
    if hardware:
        store.set(f"{prefix}/hardware/{name}", hardware.decode())
    store.set(f"{prefix}/rank/{world.rank}", text.decode())
    if world.rank == 0:
        told = [adapter(Told).validate_json(store.get(f"{prefix}/rank/{rank}")) for rank in range(world.size)]
        names = {one.node.hardware for one in told if one.node is not None}
        kinds = {one: store.get(f"{prefix}/hardware/{one}") for one in sorted(names)}
        store.set(f"{prefix}/merged", write_topology(merge(decode(told, kinds))))
    return read_topology(store.get(f"{prefix}/merged").decode(), f"{prefix}/merged")


def contribution_of(world: World) -> Contribution:
    """What this rank tells; local rank 0 probes its node."""
    gpus = gpus_of_process(os.environ) if world.device.startswith("cuda") else []
    gpu = gpu_of_device(world.device, gpus)
    place = RankPlace(world.rank, world.host or None, world.node, world.local_rank, gpu.uuid if gpu else None)
    host: Fact[str] = unknown(world.discovered_by, "the launcher gave no host name")
    if world.host:
        host = Fact(world.host, world.discovered_by, "direct")
    return Contribution(place, probe_node(host) if world.local_rank == 0 else None)


def encode(contribution: Contribution) -> tuple[bytes, str, bytes]:
    """(what is told, the hardware's name, its text); the last two are empty where no facts are."""
    facts = contribution.facts
    name, hardware = hardware_text(facts.hardware) if facts else ("", b"")
    told = Told(contribution.place, record_of(facts, name) if facts else None, len(hardware))
    return (
        json.dumps(adapter(Told).dump_python(told, mode="json", exclude_defaults=True), separators=(",", ":")).encode(),
        name,
        hardware,
    )


def decode(told: Sequence[Told], kinds: Mapping[str, bytes]) -> list[Contribution]:
    """The contributions, with hardware of one name once in memory."""
    hardware = {name: adapter(Hardware).validate_json(text) for name, text in kinds.items()}
    return [Contribution(one.place, one.node.facts(hardware[one.node.hardware]) if one.node else None) for one in told]


def merge(contributions: Sequence[Contribution]) -> Topology:
    """Merge what the ranks told; the result does not depend on the order of `contributions`."""
    ordered = sorted(contributions, key=lambda contribution: contribution.place.rank)
    ranks_by_host: dict[str, list[int]] = {}
    numbers_by_host: dict[str, set[int]] = {}
    hosts_by_number: dict[int, set[str]] = {}
    askers: dict[str, int] = {}
    for contribution in ordered:
        place = contribution.place
        if place.host is None:
            continue
        ranks_by_host.setdefault(place.host, []).append(place.rank)
        numbers_by_host.setdefault(place.host, set()).add(place.node)
        hosts_by_number.setdefault(place.node, set()).add(place.host)
        askers[place.host] = askers.get(place.host, 0) + (contribution.facts is not None)
    nodes, conflicts = merge_nodes(one.facts for one in ordered if one.facts and one.place.host is not None)
    conflicts = [f"{count} ranks on {host} are local rank 0" for host, count in askers.items() if count > 1] + conflicts
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
        nodes=tuple(nodes[host] for host in ranks_by_host if host in nodes),
        ranks_by_host={host: tuple(ranks) for host, ranks in ranks_by_host.items()},
        unplaced_ranks=tuple(c.place.rank for c in ordered if c.place.host is None),
        conflicts=tuple(conflicts),
        gpu_of_rank={one.place.rank: one.place.gpu for one in ordered if one.place.gpu is not None},
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
    return [part[: int(length)].numpy().tobytes() for part, length in zip(gathered, lengths, strict=True)]


def _broadcast_bytes(data: bytes, sender: int, group: ProcessGroup | None) -> bytes:
    """The sender's bytes on every rank, whose own are of the same length."""
    import torch
    import torch.distributed as dist

    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    source = sender if group is None else dist.get_global_rank(group, sender)
    dist.broadcast(tensor, source, group=group)
    return tensor.numpy().tobytes()

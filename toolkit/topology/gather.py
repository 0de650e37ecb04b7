"""Send the facts of all nodes to all ranks, over the process group or a torch store.

Most nodes of a large job differ only in their names, leaf switches and device identifiers. Therefore the first rank on
each kind of node sends the facts that the kind has in common, and the other ranks do not repeat them.
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
from toolkit.topology.topology_json import NodeRecord, adapter, hardware_json, read_topology, record_of, write_topology
from toolkit.world.facts import World
from toolkit.world.physical_gpu import gpu_of_device, gpus_of_process

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

__all__ = [
    "Contribution", "ContributionRecord", "contribution_of", "decode", "encode", "gather_over_store",
    "gather_topology", "merge",
]  # fmt: skip


@dataclass(frozen=True)
class Contribution:
    """What one rank sends to the others: its place, and the facts of its node if this rank probed the node."""

    place: RankPlace
    facts: NodeFacts | None


@dataclass(frozen=True, slots=True)
class ContributionRecord:
    """The JSON form of a contribution. It only names the hardware, which is sent separately in `hardware_bytes` bytes."""

    place: RankPlace
    node: NodeRecord | None
    hardware_bytes: int


def gather_topology(world: World, group: ProcessGroup | None = None) -> Topology:
    """Probe every node once, by its local rank 0, and return the same topology on every rank.

    Collective over `group` (None: all ranks), whose backend must support CPU tensors.
    """
    encoded, name, hardware = encode(contribution_of(world))
    records = [adapter(ContributionRecord).validate_json(sent) for sent in _all_gather_bytes(encoded, group)]
    kinds: dict[str, bytes] = {}
    for sender, record in enumerate(records):
        if record.node is not None and record.node.hardware not in kinds:
            own = hardware if record.node.hardware == name else b" " * record.hardware_bytes
            kinds[record.node.hardware] = _broadcast_bytes(own, sender, group)
    return merge(decode(records, kinds))


def gather_over_store(world: World, store: Store, prefix: str = "topology") -> Topology:
    """Probe every node once and return the same topology on every rank, over a torch store instead of a process group.

    Collective over all ranks of `world`. Rank 0 merges the nodes; the other ranks wait for it with the timeout of the
    store. Each call needs a different `prefix`.
    """
    encoded, name, hardware = encode(contribution_of(world))
    if hardware:
        store.set(f"{prefix}/hardware/{name}", hardware.decode())
    store.set(f"{prefix}/rank/{world.rank}", encoded.decode())
    if world.rank == 0:
        reader = adapter(ContributionRecord)
        records = [reader.validate_json(store.get(f"{prefix}/rank/{rank}")) for rank in range(world.size)]
        names = {record.node.hardware for record in records if record.node is not None}
        kinds = {kind: store.get(f"{prefix}/hardware/{kind}") for kind in sorted(names)}
        store.set(f"{prefix}/merged", write_topology(merge(decode(records, kinds))))
    return read_topology(store.get(f"{prefix}/merged").decode(), f"{prefix}/merged")


def contribution_of(world: World) -> Contribution:
    """Return the contribution of this rank; local rank 0 also probes the node."""
    gpus = gpus_of_process(os.environ) if world.device.startswith("cuda") else []
    gpu = gpu_of_device(world.device, gpus)
    place = RankPlace(world.rank, world.host or None, world.node, world.local_rank, gpu.uuid if gpu else None)
    host: Fact[str] = unknown(world.discovered_by, "the launcher reports no host name")
    if world.host:
        host = Fact(world.host, world.discovered_by, "direct")
    return Contribution(place, probe_node(host) if world.local_rank == 0 else None)


def encode(contribution: Contribution) -> tuple[bytes, str, bytes]:
    """Return (contribution JSON, hardware name, hardware JSON); the last two are empty if there are no facts."""
    facts = contribution.facts
    name, hardware = hardware_json(facts.hardware) if facts else ("", b"")
    record = ContributionRecord(contribution.place, record_of(facts, name) if facts else None, len(hardware))
    body = adapter(ContributionRecord).dump_python(record, mode="json", exclude_defaults=True)
    return json.dumps(body, separators=(",", ":")).encode(), name, hardware


def decode(records: Sequence[ContributionRecord], kinds: Mapping[str, bytes]) -> list[Contribution]:
    """Return the contributions; nodes with the same hardware name share one `Hardware` object."""
    hardware = {name: adapter(Hardware).validate_json(sent) for name, sent in kinds.items()}
    return [
        Contribution(record.place, record.node.facts(hardware[record.node.hardware]) if record.node else None)
        for record in records
    ]


def merge(contributions: Sequence[Contribution]) -> Topology:
    """Merge the contributions of all ranks; the result does not depend on their order."""
    ordered = sorted(contributions, key=lambda contribution: contribution.place.rank)
    ranks_by_host: dict[str, list[int]] = {}
    numbers_by_host: dict[str, set[int]] = {}
    hosts_by_number: dict[int, set[str]] = {}
    probes: dict[str, int] = {}
    for contribution in ordered:
        place = contribution.place
        if place.host is None:
            continue
        ranks_by_host.setdefault(place.host, []).append(place.rank)
        numbers_by_host.setdefault(place.host, set()).add(place.node)
        hosts_by_number.setdefault(place.node, set()).add(place.host)
        probes[place.host] = probes.get(place.host, 0) + (contribution.facts is not None)
    nodes, conflicts = merge_nodes(c.facts for c in ordered if c.facts and c.place.host is not None)
    conflicts = [
        f"{count} ranks on {host} have local rank 0" for host, count in probes.items() if count > 1
    ] + conflicts
    # Different machines with the same name, such as "localhost", have different node numbers from the launcher.
    conflicts += [
        f"ranks on host {host} report several node numbers, {sorted(numbers)}"
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
        gpu_of_rank={c.place.rank: c.place.gpu for c in ordered if c.place.gpu is not None},
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
    """Return the bytes of the sender on every rank; on the other ranks, `data` must have the same length."""
    import torch
    import torch.distributed as dist

    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    source = sender if group is None else dist.get_global_rank(group, sender)
    dist.broadcast(tensor, source, group=group)
    return tensor.numpy().tobytes()

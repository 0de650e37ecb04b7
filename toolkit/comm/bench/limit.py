"""What the hardware between the ranks carries at most.

Of GPUs in one clique their NVLinks, between nodes the adapters of a node, by the facts of the topology; between processes
of one node what a core copies.
"""

from __future__ import annotations

import time

import numpy as np

from toolkit.errors import ToolkitError
from toolkit.metrics.collectives import Limit
from toolkit.topology.facts import Topology
from toolkit.topology.tiers_found import tiers_of_topology
from toolkit.world.facts import World

_COPIES = 7


def find_limit(world: World, topology: Topology, last_bytes: int) -> tuple[Limit | None, str]:
    """(the limit, why there is none). What is only assumed of a link is no limit.

    Not collective: on one node without GPUs it copies memory, on the rank that asks.
    """
    nodes = len(topology.ranks_by_host) + len(topology.unplaced_ranks)
    on_gpu = world.device.startswith("cuda")
    if nodes == 1 and not on_gpu:
        return Limit(copy_rate(last_bytes), "rank", f"memcpy of one core, {_words(last_bytes)} at a time, measured"), ""
    try:
        tiers = tiers_of_topology(topology)
    except ToolkitError as error:
        return None, f"limit: {error.message}"
    everybody = np.arange(tiers.size).reshape(1, -1)
    level = tiers.levels[int(tiers.finest_common(everybody)[0])]
    if on_gpu and level.name == "clique":
        return Limit(level.link.bytes_per_s / 1e9, "rank", level.link.source), ""
    if nodes == 1:
        return None, "limit: these GPUs are not one NVLink clique, and what PCIe carries nobody tells"
    return _adapters(topology)


def _adapters(topology: Topology) -> tuple[Limit | None, str]:
    """All active ports of the node that has the least: what the topology's links give to a rank alone is a part of them."""
    found = []
    for node in topology.nodes:
        ports = [port.rate_gbit_per_s for nic in node.hardware.nics.value or () for port in nic.ports]
        known = [(rate.value, rate.source) for rate in ports if rate.value is not None]
        if not known:
            return None, f"limit: no network adapter of {node.host.value} tells its rate"
        total = sum(rate for rate, _ in known)
        sources = ", ".join(dict.fromkeys(source for _, source in known))
        said = f"{len(known)} active port{'s' * (len(known) != 1)} of a node, {total:g} Gbit/s by {sources}"
        found.append(Limit(total / 8, "node", said))
    return min(found, key=lambda limit: limit.gb_per_s), ""


def copy_rate(size_bytes: int) -> float:
    """GB/s that one core copies from memory to memory, the best of a few times."""
    source, target = np.zeros(max(size_bytes, 1), np.uint8), np.ones(max(size_bytes, 1), np.uint8)
    source += 1  # pages that nobody wrote to are one page, and always cached
    seconds = []
    for _ in range(_COPIES):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return len(source) / max(min(seconds), 1e-9) / 1e9


def _words(size_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes} bytes"

"""The bandwidth limit of the hardware between the ranks.

For GPUs in one clique it is their NVLinks, between nodes the adapters of a node, both from the topology's facts; between
processes of one node the copy rate of a core.
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
    """(the limit, the reason why there is none). An assumed rate is never a limit.

    Not collective: on one node without GPUs, the calling rank copies memory.
    """
    nodes = len(topology.ranks_by_host) + len(topology.unplaced_ranks)
    on_gpu = world.device.startswith("cuda")
    if nodes == 1 and not on_gpu:
        return Limit(copy_rate(last_bytes), "rank", f"memcpy of one core, {_size(last_bytes)} at a time, measured"), ""
    try:
        tiers = tiers_of_topology(topology)
    except ToolkitError as error:
        return None, f"limit: {error.message}"
    everybody = np.arange(tiers.size).reshape(1, -1)
    level = tiers.levels[int(tiers.finest_common(everybody)[0])]
    if on_gpu and level.name == "clique":
        return Limit(level.link.bytes_per_s / 1e9, "rank", level.link.source), ""
    if nodes == 1:
        return None, "limit: these GPUs are not one NVLink clique, and the rate of PCIe is unknown"
    return _adapters(topology)


def _adapters(topology: Topology) -> tuple[Limit | None, str]:
    """The active ports of the node with the lowest total; the link of a single rank is a part of them."""
    limits = []
    for node in topology.nodes:
        ports = [port.rate_gbit_per_s for nic in node.hardware.nics.value or () for port in nic.ports]
        known = [(rate.value, rate.source) for rate in ports if rate.value is not None]
        if not known:
            return None, f"limit: the rate of every network adapter of {node.host.value} is unknown"
        total = sum(rate for rate, _ in known)
        sources = ", ".join(dict.fromkeys(source for _, source in known))
        description = f"{len(known)} active port{'s' * (len(known) != 1)} of a node, {total:g} Gbit/s by {sources}"
        limits.append(Limit(total / 8, "node", description))
    return min(limits, key=lambda limit: limit.gb_per_s), ""


def copy_rate(size_bytes: int) -> float:
    """GB/s of a memory copy by one core, the best of several."""
    source, target = np.zeros(max(size_bytes, 1), np.uint8), np.ones(max(size_bytes, 1), np.uint8)
    source += 1  # unwritten pages share one page, which is always cached
    seconds = []
    for _ in range(_COPIES):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return len(source) / max(min(seconds), 1e-9) / 1e9


def _size(size_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes} bytes"

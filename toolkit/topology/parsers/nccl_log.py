"""Read what NCCL prints with `NCCL_DEBUG=INFO`: ranks, network, NICs and channels.

Lines of several processes stand among each other, and among what the program prints itself. Of several communicators
the one with the most ranks counts: it is that of all processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.host_lines import read_lines_with_hosts
from toolkit.topology.parsers.nccl_log_lines import LogReader

KEYS = {
    "nranks": "how many ranks the communicator has; of several, the most",
    "net": "the network that NCCL uses between nodes, in its word: IB, Socket, OFI or a plugin's name",
    "hosts": "the hosts before the lines, sorted; null where the lines begin with none",
    "nnodes": "how many nodes the communicator has",
    "local_ranks": "how many ranks it has on the node that says so",
    "coll_channels": "how many channels there are for collectives, as the line of all kinds of channels has it",
    "channels": "how many channels there are, as the lines of the rings have it",
    "nics": "the InfiniBand or RoCE devices that are used, in NCCL's order",
    "oob": "the interface over which processes find each other, beside the devices",
    "env": "each variable that NCCL says was set by the environment, and its value; null where it says of none",
}


@dataclass(frozen=True)
class NcclLog:
    """None where no line says so, or lines contradict one another."""

    rank_count: int | None
    network: str | None
    hosts: tuple[str, ...] | None
    node_count: int | None
    local_rank_count: int | None
    collective_channels: int | None
    ring_channels: int | None
    devices: tuple[str, ...] | None
    bootstrap_interface: str | None
    environment: Mapping[str, str | None] | None


def parse_nccl_log(text: str) -> tuple[NcclLog, tuple[str, ...]]:
    """Read the whole log: (facts, warnings that name the damaged lines and what no line says).

    Raises:
        CheckFailedError: no line of it is NCCL's.
    """
    lines, warnings = read_lines_with_hosts(text)
    reader = LogReader(warnings)
    for line in lines:
        reader.read(line)
    if not reader.lines:
        said = f": {lines[0].text[:60]!r}" if lines else ""
        raise CheckFailedError(f"no line that NCCL prints{said}", where=f"line {lines[0].number if lines else 1}")
    reader.compare(lines[-1].number)
    facts = NcclLog(
        rank_count=reader.rank_count(),
        network=reader.network(),
        hosts=tuple(sorted(reader.hosts)) or None,
        node_count=reader.of_largest(1),
        local_rank_count=reader.of_largest(2),
        collective_channels=max(reader.collective, default=None),
        ring_channels=max(reader.rings, default=None),
        devices=reader.one("devices"),
        bootstrap_interface=reader.one("interface"),
        environment=reader.environment or None,
    )
    _name_unsaid(facts, lines[-1].number, warnings)
    return facts, tuple(warnings)


def _name_unsaid(facts: NcclLog, last: int, warnings: list[str]) -> None:
    over_ib = facts.network == "IB"
    for value, what in (
        (facts.rank_count, "how many ranks there are"),
        (facts.node_count, "how many nodes there are"),
        (facts.network, "which network is used"),
        (facts.hosts, "on which host it was printed"),
        (facts.collective_channels, "how many channels there are for collectives"),
        (facts.ring_channels, "how many rings there are"),
        (facts.devices if over_ib else 0, "which devices are used"),
        (facts.bootstrap_interface if over_ib else 0, "over which interface processes find each other"),
    ):
        if value is None:
            warnings.append(f"line {last}: no line says {what}")


def answer_nccl_log(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of `KEYS` and warnings.

    Raises:
        CheckFailedError: no line of it is NCCL's.
    """
    facts, warnings = parse_nccl_log(text)
    return {
        "nranks": facts.rank_count,
        "net": facts.network,
        "hosts": None if facts.hosts is None else list(facts.hosts),
        "nnodes": facts.node_count,
        "local_ranks": facts.local_rank_count,
        "coll_channels": facts.collective_channels,
        "channels": facts.ring_channels,
        "nics": None if facts.devices is None else list(facts.devices),
        "oob": facts.bootstrap_interface,
        "env": None if facts.environment is None else dict(facts.environment),
    }, warnings

"""Read what NCCL prints with `NCCL_DEBUG=INFO`: ranks, network, NICs and channels.

Lines of several processes are mixed with each other, and with what the program prints itself. Of several communicators
the one with the most ranks counts: it is that of all processes. A line with the words of a fact that has not its form is
damaged: it is named, and nothing is read from it.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.topology.readers.lines import Line, first_damaged, read_lines_with_hosts, refusal

__all__ = ["NcclLog", "parse_nccl_log"]

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


_NCCL = re.compile(r"NCCL (?:INFO|WARN|TRACE|ABORT|VERSION|DEBUG) (.*)")
_PROCESS = re.compile(r"(?:^|[ \])>:])([A-Za-z0-9][A-Za-z0-9_.-]*):([0-9]{1,9}):([0-9]{1,9}) \[[0-9]{1,4}\] ", re.ASCII)
_FRAGMENT = re.compile(
    r"\bINFO\b|NET/|set by environment|\bn[rR]anks\b|coll channels|:[0-9]+:[0-9]+ \[[0-9]+\]|Using network"
)
_RANKS = re.compile(r"\bcomm 0x[0-9a-f]+ (?:rank ([0-9]{1,7}) )?n[rR]anks ([0-9]{1,7})\b(?! of)", re.ASCII)
_NODES = re.compile(
    r"n[rR]anks ([0-9]{1,7}) nNodes ([0-9]{1,6}) localRanks ([0-9]{1,4}) localRank ([0-9]{1,4})\b", re.ASCII
)
_NETWORK = re.compile(r"Using network ([A-Za-z][\w -]*)")
_ANY_NETWORK = re.compile(r"NET/(IB|OFI|Socket|UCX|IBext\w*|FastSocket)\b(?! : No device)")
_DEVICES = re.compile(r"NET/IB ?: Using (\[0\].*?) ?(?:\[RO\])? ?; ?OOB ([\w.-]+)(?::[0-9a-fA-F.:%\w]+<[0-9]+>)?")
_DEVICE = re.compile(r"\[([0-9]{1,3})\]([\w.+-]+):[0-9]{1,3}/(?:IB|RoCE|OPA|Ethernet)(?:/\w+)?")
_RING = re.compile(r"Channel ([0-9]{1,3})/([0-9]{1,3}) :((?:\s+[0-9]{1,7})+)", re.ASCII)
_COLLECTIVE = re.compile(
    r"([0-9]{1,3}) coll channels(?:, [0-9]{1,3} (?:collnet|nvls) channels)*, [0-9]{1,3} p2p channels, [0-9]{1,3} p2p channels per peer"
)
_ENVIRONMENT = re.compile(r"((?:NCCL|RCCL|OFI|FI|HSA|CUDA)_[A-Z0-9_]+) set (?:by environment )?to ([^\ufffd]*?)(\.?)")


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
    """Read the whole log: (facts, warnings that name the first damaged line and what no line says).

    Raises:
        CheckFailedError: no line of it is NCCL's.
    """
    lines, warnings = read_lines_with_hosts(text)
    reader = _LogReader(warnings)
    for line in lines:
        reader.read(line)
    if not reader.lines:
        raise refusal("NCCL", lines)
    facts = NcclLog(
        rank_count=reader.rank_count(),
        network=reader.network(),
        hosts=tuple(sorted(reader.hosts())) or None,
        node_count=reader.of_largest(1),
        local_rank_count=reader.of_largest(2),
        collective_channels=max(reader.collective, default=None),
        ring_channels=max(reader.rings, default=None),
        devices=reader.one("devices"),
        bootstrap_interface=reader.one("interface"),
        environment=reader.environment or None,
    )
    reader.name_differences(lines[-1].number)
    return facts, (*first_damaged(warnings), *_unsaid(facts, lines[-1].number))


def _unsaid(facts: NcclLog, last: int) -> list[str]:
    over_ib = facts.network == "IB"
    facts_in_words = (
        (facts.rank_count, "how many ranks there are"),
        (facts.node_count, "how many nodes there are"),
        (facts.network, "which network is used"),
        (facts.hosts, "on which host it was printed"),
        (facts.collective_channels, "how many channels there are for collectives"),
        (facts.ring_channels, "how many rings there are"),
        (facts.devices if over_ib else 0, "which devices are used"),
        (facts.bootstrap_interface if over_ib else 0, "over which interface processes find each other"),
    )
    return [f"line {last}: no line says {what}" for value, what in facts_in_words if value is None]


class _LogReader:
    """What was read so far; lines are given to it in their order."""

    def __init__(self, warnings: list[str]) -> None:
        self.warnings = warnings
        self.lines = 0
        self.processes: dict[str, set[str]] = defaultdict(set)  # hosts by the numbers of process and thread
        self.communicators: list[tuple[int, int | None, int | None]] = []  # ranks, nodes, ranks of this node
        self.collective: list[int] = []
        self.rings: list[int] = []
        self.ring_lengths: list[int] = []
        self.environment: dict[str, str | None] = {}
        self._found: dict[str, set[Any]] = defaultdict(set)

    def read(self, line: Line) -> None:
        """Read one line; what the program itself prints is passed over."""
        match = _NCCL.search(line.text)
        if not match:
            if "NCCL version" not in line.text and _FRAGMENT.search(line.text):
                self._name(line, "not a whole line of NCCL")
            return
        self.lines += 1
        if _NCCL.search(match[1]):
            self._name(line, "two lines of NCCL in one")
            return
        if process := _PROCESS.search(line.text[: match.start()]):
            self.processes[f"{process[2]}:{process[3]}"].add(process[1])
        self._message(line, match[1])

    def _message(self, line: Line, said: str) -> None:
        if ranks := _RANKS.search(said):
            self._communicator(line, said, ranks)
        elif re.search(r"\bn[rR]anks\b|nNodes", said):
            self._name(line, "not the ranks of a communicator")
        if network := _NETWORK.fullmatch(said):
            self._found["network"].add(network[1])
        elif network := _ANY_NETWORK.search(said):
            self._found["seen"].add(network[1])
        elif re.search(r"\bnetwork\b", said):
            self._name(line, "not the network")
        if re.match(r"NET/IB ?:", said) and "No device" not in said and "Made virtual" not in said:
            self._devices(line, said)
        elif "OOB" in said:
            self._name(line, "not the devices of NET/IB")
        if ring := _RING.fullmatch(said):
            self._ring(line, ring)
        elif re.match(r"Channel\b", said) and "->" not in said:
            self._name(line, "not the ring of a channel")
        if collective := _COLLECTIVE.fullmatch(said):
            self.collective.append(int(collective[1]))
        elif re.search(r"coll channels|p2p channels per peer", said):
            self._name(line, "not the numbers of channels")
        if variable := _ENVIRONMENT.fullmatch(said):
            self._variable(line, variable)
        elif re.search(r"^\S*[A-Z]_[A-Z0-9_]+ .*\b(set|environment)\b|environment to|set by env", said):
            self._name(line, "not a variable of the environment")

    def _communicator(self, line: Line, said: str, ranks: re.Match[str]) -> None:
        count = int(ranks[2])
        nodes = _NODES.search(said)
        local = nodes and (int(nodes[2]), int(nodes[3]), int(nodes[4]))
        if (ranks[1] and int(ranks[1]) >= count) or (
            local and not (0 < local[0] <= count and local[2] < local[1] <= count)
        ):
            self._name(line, "ranks that do not fit one another")
            return
        if "nNodes" in said and not nodes:
            self._name(line, "not the nodes of a communicator")
        self.communicators.append((count, local[0] if local else None, local[1] if local else None))

    def _devices(self, line: Line, said: str) -> None:
        match = _DEVICES.fullmatch(said)
        devices = [_DEVICE.fullmatch(word) for word in match[1].split()] if match else []
        numbers = [int(device[1]) for device in devices if device]
        if match is None or None in devices or numbers != list(range(len(devices))):
            self._name(line, "not the devices of NET/IB, counted from 0")
            return
        self._found["devices"].add(tuple(dict.fromkeys(device[2] for device in devices if device)))
        self._found["interface"].add(match[2])

    def _ring(self, line: Line, ring: re.Match[str]) -> None:
        ranks = [int(word) for word in ring[3].split()]
        if int(ring[1]) >= int(ring[2]) or sorted(ranks) != list(range(len(ranks))):
            self._name(line, "not a ring of all ranks")
            return
        self.rings.append(int(ring[2]))
        self.ring_lengths.append(len(ranks))

    def _variable(self, line: Line, variable: re.Match[str]) -> None:
        name, value = variable[1], variable[2]
        if self.environment.get(name, value) != value:
            self._name(line, f"{name} has another value in an earlier line")
            self.environment[name] = None
        else:
            self.environment[name] = value

    def _name(self, line: Line, what: str) -> None:
        self.warnings.append(f"line {line.number}: {what}: {line.text.strip()[:80]!r}")

    def name_differences(self, last: int) -> None:
        """Name the facts that two lines state differently."""
        for name in ("network", "devices", "interface"):
            if len(found := self._found[name]) > 1:
                self.warnings.append(f"line {last}: lines differ in the {name}: {sorted(map(str, found))[:4]}")

    def hosts(self) -> set[str]:
        """The hosts of all processes, without a name that has the end of a program's line before it."""
        return {
            host
            for hosts in self.processes.values()
            for host in hosts
            if not any(host != other and host.endswith(other) for other in hosts)
        }

    def one(self, name: str) -> Any:
        """What all lines state alike; None if they differ or no line states it."""
        found = self._found[name]
        return next(iter(found)) if len(found) == 1 else None

    def network(self) -> str | None:
        """The network in use, else the only one that any line names."""
        return self.one("network") if self._found["network"] else self.one("seen")

    def rank_count(self) -> int | None:
        """The ranks of the largest communicator, or of a ring if no line is of a communicator."""
        return max((count for count, _, _ in self.communicators), default=max(self.ring_lengths, default=None))

    def of_largest(self, which: int) -> int | None:
        """One of the other numbers of the largest communicator: the first line that has it."""
        most = self.rank_count()
        return next(
            (entry[which] for entry in self.communicators if entry[0] == most and entry[which] is not None), None
        )


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

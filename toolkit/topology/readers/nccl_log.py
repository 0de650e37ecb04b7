"""Read the log that NCCL prints with `NCCL_DEBUG=INFO`: ranks, network, NICs and channels.

Lines of several processes are mixed with each other and with output of the program. If there are several communicators,
toolkit uses the one with the most ranks, which contains all processes. A line that contains the keywords of a fact but
does not have its format is damaged: toolkit ignores it, and a warning names it.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.topology.readers.lines import Line, first_damaged, read_lines_with_hosts, refusal

__all__ = ["NcclLog", "parse_nccl_log"]

KEYS = {
    "nranks": "number of ranks of the largest communicator",
    "net": "the network that NCCL uses between nodes: IB, Socket, OFI or the name of a plugin",
    "hosts": "the host names at the start of the lines, sorted; null if lines do not start with one",
    "nnodes": "number of nodes of the communicator",
    "local_ranks": "number of its ranks on the node that logged this number",
    "coll_channels": "number of channels for collectives, from the line that lists all kinds of channels",
    "channels": "number of channels, from the lines of the rings",
    "nics": "the InfiniBand or RoCE devices in use, in the order of NCCL",
    "oob": "the interface for the bootstrap (out-of-band) connections, from the line that lists the devices",
    "env": "each variable that NCCL logs as set by the environment, with its value; null if it logs none",
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
    """The facts in a log; None if no line states a fact, or if lines contradict each other."""

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
    """Return (facts, warnings that name the first damaged line and the missing facts) for a log.

    Raises:
        CheckFailedError: the log does not contain a line from NCCL.
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
        (facts.rank_count, "the number of ranks"),
        (facts.node_count, "the number of nodes"),
        (facts.network, "the network in use"),
        (facts.hosts, "its host"),
        (facts.collective_channels, "the number of channels for collectives"),
        (facts.ring_channels, "the number of rings"),
        (facts.devices if over_ib else 0, "the devices in use"),
        (facts.bootstrap_interface if over_ib else 0, "the interface for bootstrap connections"),
    )
    return [f"line {last}: no line states {what}" for value, what in facts_in_words if value is None]


class _LogReader:
    """Collects the facts while it reads the lines of a log in order."""

    def __init__(self, warnings: list[str]) -> None:
        self.warnings = warnings
        self.lines = 0
        self.processes: dict[str, set[str]] = defaultdict(set)  # host names by process and thread id
        self.communicators: list[tuple[int, int | None, int | None]] = []  # ranks, nodes, ranks on the logging node
        self.collective: list[int] = []
        self.rings: list[int] = []
        self.ring_lengths: list[int] = []
        self.environment: dict[str, str | None] = {}
        self._found: dict[str, set[Any]] = defaultdict(set)

    def read(self, line: Line) -> None:
        """Read one line; lines that are not from NCCL are ignored."""
        match = _NCCL.search(line.text)
        if not match:
            if "NCCL version" not in line.text and _FRAGMENT.search(line.text):
                self._name(line, "an incomplete NCCL line")
            return
        self.lines += 1
        if _NCCL.search(match[1]):
            self._name(line, "two NCCL messages in one line")
            return
        if process := _PROCESS.search(line.text[: match.start()]):
            self.processes[f"{process[2]}:{process[3]}"].add(process[1])
        self._message(line, match[1])

    def _message(self, line: Line, said: str) -> None:
        if ranks := _RANKS.search(said):
            self._communicator(line, said, ranks)
        elif re.search(r"\bn[rR]anks\b|nNodes", said):
            self._name(line, "expected the ranks of a communicator, got")
        if network := _NETWORK.fullmatch(said):
            self._found["network"].add(network[1])
        elif network := _ANY_NETWORK.search(said):
            self._found["seen"].add(network[1])
        elif re.search(r"\bnetwork\b", said):
            self._name(line, "expected the network in use, got")
        if re.match(r"NET/IB ?:", said) and "No device" not in said and "Made virtual" not in said:
            self._devices(line, said)
        elif "OOB" in said:
            self._name(line, "expected the devices of NET/IB, got")
        if ring := _RING.fullmatch(said):
            self._ring(line, ring)
        elif re.match(r"Channel\b", said) and "->" not in said:
            self._name(line, "expected the ring of a channel, got")
        if collective := _COLLECTIVE.fullmatch(said):
            self.collective.append(int(collective[1]))
        elif re.search(r"coll channels|p2p channels per peer", said):
            self._name(line, "expected the numbers of channels, got")
        if variable := _ENVIRONMENT.fullmatch(said):
            self._variable(line, variable)
        elif re.search(r"^\S*[A-Z]_[A-Z0-9_]+ .*\b(set|environment)\b|environment to|set by env", said):
            self._name(line, "expected an environment variable, got")

    def _communicator(self, line: Line, said: str, ranks: re.Match[str]) -> None:
        count = int(ranks[2])
        nodes = _NODES.search(said)
        local = nodes and (int(nodes[2]), int(nodes[3]), int(nodes[4]))
        if (ranks[1] and int(ranks[1]) >= count) or (
            local and not (0 < local[0] <= count and local[2] < local[1] <= count)
        ):
            self._name(line, "inconsistent numbers of ranks")
            return
        if "nNodes" in said and not nodes:
            self._name(line, "expected the nodes of a communicator, got")
        self.communicators.append((count, local[0] if local else None, local[1] if local else None))

    def _devices(self, line: Line, said: str) -> None:
        match = _DEVICES.fullmatch(said)
        devices = [_DEVICE.fullmatch(word) for word in match[1].split()] if match else []
        numbers = [int(device[1]) for device in devices if device]
        if match is None or None in devices or numbers != list(range(len(devices))):
            self._name(line, "expected the devices of NET/IB, numbered from 0, got")
            return
        self._found["devices"].add(tuple(dict.fromkeys(device[2] for device in devices if device)))
        self._found["interface"].add(match[2])

    def _ring(self, line: Line, ring: re.Match[str]) -> None:
        ranks = [int(word) for word in ring[3].split()]
        if int(ring[1]) >= int(ring[2]) or sorted(ranks) != list(range(len(ranks))):
            self._name(line, "expected a ring of all ranks, got")
            return
        self.rings.append(int(ring[2]))
        self.ring_lengths.append(len(ranks))

    def _variable(self, line: Line, variable: re.Match[str]) -> None:
        name, value = variable[1], variable[2]
        if self.environment.get(name, value) != value:
            self._name(line, f"an earlier line has a different value of {name}")
            self.environment[name] = None
        else:
            self.environment[name] = value

    def _name(self, line: Line, what: str) -> None:
        self.warnings.append(f"line {line.number}: {what}: {line.text.strip()[:80]!r}")

    def name_differences(self, last: int) -> None:
        """Add a warning for each fact on which lines disagree."""
        for name in ("network", "devices", "interface"):
            if len(found := self._found[name]) > 1:
                self.warnings.append(f"line {last}: lines differ in the {name}: {sorted(map(str, found))[:4]}")

    def hosts(self) -> set[str]:
        """Return the hosts of all processes; names to which other output is prepended in a mixed line are omitted."""
        return {
            host
            for hosts in self.processes.values()
            for host in hosts
            if not any(host != other and host.endswith(other) for other in hosts)
        }

    def one(self, name: str) -> Any:
        """Return the value on which all lines agree; None if they differ or no line states it."""
        found = self._found[name]
        return next(iter(found)) if len(found) == 1 else None

    def network(self) -> str | None:
        """Return the network that NCCL reports as used, else the only network in the log."""
        return self.one("network") if self._found["network"] else self.one("seen")

    def rank_count(self) -> int | None:
        """Return the size of the largest communicator, or of the largest ring if no line names a communicator."""
        return max((count for count, _, _ in self.communicators), default=max(self.ring_lengths, default=None))

    def of_largest(self, which: int) -> int | None:
        """Return field `which` of the largest communicator, from the first line that contains it."""
        most = self.rank_count()
        return next(
            (entry[which] for entry in self.communicators if entry[0] == most and entry[which] is not None), None
        )


def answer_nccl_log(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (values of `KEYS`, warnings).

    Raises:
        CheckFailedError: the log does not contain a line from NCCL.
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

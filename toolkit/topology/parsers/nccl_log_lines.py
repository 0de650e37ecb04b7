"""The lines of NCCL's log, one by one.

A line that holds the words of a fact but has not its form is damaged: it is named, and nothing is read from it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from toolkit.topology.parsers.host_lines import Line

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
_ENVIRONMENT = re.compile(r"((?:NCCL|RCCL|OFI|FI|HSA|CUDA)_[A-Z0-9_]+) set (?:by environment )?to (.*?)(\.?)")


class LogReader:
    """What was read so far; lines are given to it in their order."""

    def __init__(self, warnings: list[str]) -> None:
        self.warnings = warnings
        self.lines = 0
        self.hosts: dict[str, list[int]] = defaultdict(list)
        self.communicators: list[tuple[int, int | None, int | None]] = []  # ranks, nodes, ranks of this node
        self.collective: list[int] = []
        self.rings: list[int] = []
        self.ring_lengths: list[int] = []
        self.environment: dict[str, str | None] = {}
        self._found: dict[str, list[Any]] = defaultdict(list)
        self._unnamed: list[int] = []
        self._processes: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._channels: dict[tuple[str, int], set[int]] = defaultdict(set)
        self._dots: dict[bool, list[int]] = {True: [], False: []}
        self._before = ""

    def read(self, line: Line) -> None:
        """Take one line in; what the program printed itself is passed over."""
        match = _NCCL.search(line.text)
        again, self._before = line.text == self._before, line.text
        if not match:
            if "NCCL version" not in line.text and _FRAGMENT.search(line.text):
                self._name(line, "not a whole line of NCCL")
            return
        self.lines += 1
        if again:
            self._name(line, "the same as the line before")
        process = _PROCESS.search(line.text[: match.start()])
        if process:
            self.hosts[process[1]].append(line.number)
            self._processes[process[2], process[3]].add(process[1])
        else:
            self._unnamed.append(line.number)
        if _NCCL.search(match[1]):
            self._name(line, "two lines of NCCL in one")
            return
        self._message(line, match[1], process[0].strip() if process else "")

    def _message(self, line: Line, said: str, process: str) -> None:
        if ranks := _RANKS.search(said):
            self._communicator(line, said, ranks)
        elif re.search(r"\bn[rR]anks\b|nNodes", said):
            self._name(line, "not the ranks of a communicator")
        if network := _NETWORK.fullmatch(said):
            self._found["network"].append(network[1])
        elif network := _ANY_NETWORK.search(said):
            self._found["seen"].append(network[1])
        elif re.search(r"\bnetwork\b", said):
            self._name(line, "not the network")
        if re.match(r"NET/IB ?:", said) and "No device" not in said and "Made virtual" not in said:
            self._devices(line, said)
        elif "OOB" in said:
            self._name(line, "not the devices of NET/IB")
        if ring := _RING.fullmatch(said):
            self._ring(line, ring, process)
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
        self._found["devices"].append(tuple(dict.fromkeys(device[2] for device in devices if device)))
        self._found["interface"].append(match[2])

    def _ring(self, line: Line, ring: re.Match[str], process: str) -> None:
        ranks = [int(word) for word in ring[3].split()]
        channel, count = int(ring[1]), int(ring[2])
        if channel >= count or sorted(ranks) != list(range(len(ranks))):
            self._name(line, "not a ring of all ranks")
            return
        if channel in self._channels[process, count]:
            self._name(line, f"channel {channel} stands in an earlier line, too")
        self._channels[process, count].add(channel)
        self.rings.append(count)
        self.ring_lengths.append(len(ranks))

    def _variable(self, line: Line, variable: re.Match[str]) -> None:
        name, value = variable[1], variable[2]
        self._dots[bool(variable[3])].append(line.number)
        if self.environment.get(name, value) != value:
            self._name(line, f"{name} has another value in an earlier line")
            value = None
        self.environment[name] = value

    def _name(self, line: Line, what: str) -> None:
        self.warnings.append(f"line {line.number}: {what}: {line.text.strip()[:80]!r}")

    def compare(self, last: int) -> None:
        """Name what the lines say against one another."""
        if self.hosts and self._unnamed:
            self.warnings += [f"line {number}: no host before NCCL, as on other lines" for number in self._unnamed]
        for hosts in self._processes.values():
            for host in hosts:
                if len(self.hosts[host]) == 1 and any(_is_part(host, other) for other in hosts - {host}):
                    self.warnings.append(f"line {self.hosts[host][0]}: {host!r} is another host's name, cut")
                    self._found["cut"].append(host)
        for host in self._found.pop("cut", []):
            self.hosts.pop(host, None)
        for (_, count), seen in self._channels.items():
            if len(seen) != count:
                self.warnings.append(f"line {last}: {count} channels, but rings of {len(seen)}")
        counts = {count for count, _, _ in self.communicators}
        for length in set(self.ring_lengths) - counts if counts else ():
            self.warnings.append(f"line {last}: a ring of {length} ranks, but communicators of {sorted(counts)}")
        if self._dots[True] and self._dots[False]:
            self.warnings += [
                f"line {number}: no full stop at its end, as on other lines" for number in self._dots[False]
            ]
        if self.collective and self.rings and not set(self.collective) & set(self.rings):
            self.warnings.append(f"line {last}: {self.rings[0]} channels, but {self.collective[0]} for collectives")
        for name in ("network", "devices", "interface"):
            if len(set(self._found[name])) > 1:
                self.warnings.append(
                    f"line {last}: lines differ in the {name}: {sorted(map(str, set(self._found[name])))[:4]}"
                )

    def one(self, name: str) -> Any:
        """What all lines say alike; None where they differ or none says it."""
        return self._found[name][0] if len(set(self._found[name])) == 1 else None

    def network(self) -> str | None:
        """The network that is said to be used, else the only one that is spoken of."""
        return self.one("network") if self._found["network"] else self.one("seen")

    def rank_count(self) -> int | None:
        """The ranks of the largest communicator, or of a ring where no line tells of communicators."""
        return max((count for count, _, _ in self.communicators), default=max(self.ring_lengths, default=None))

    def of_largest(self, which: int) -> int | None:
        """One of the other numbers of the largest communicator: the first line that has it."""
        most = self.rank_count()
        return next(
            (entry[which] for entry in self.communicators if entry[0] == most and entry[which] is not None), None
        )


def _is_part(short: str, name: str) -> bool:
    """Whether one name is left of another when some letters in a row are lost."""
    begin = next((i for i, (a, b) in enumerate(zip(short, name, strict=False)) if a != b), len(short))
    return len(short) < len(name) and name.endswith(short[begin:])

"""Read GPUDirect use, connections between nodes and failures from an NCCL log, in addition to readers/nccl_log.py."""

import re
from collections import Counter
from dataclasses import dataclass, field

from toolkit.topology.nccl.variables import log_reasons
from toolkit.topology.readers.lines import read_lines_with_hosts

__all__ = ["LogEvidence", "read_evidence"]

_MESSAGE = re.compile(r"NCCL (INFO|WARN) (.*)")
_CHANNEL = re.compile(
    r"Channel ([0-9]{1,3})(?:/[0-9]+)? : ([0-9]{1,7})\[[^\]]*\] -> ([0-9]{1,7})\[[^\]]*\] \[(send|receive)\] "
    r"via NET/([^/\s]+)(?:/([0-9]{1,4})(?:\([0-9]+\))?)?(/GDRDMA\S*|/Shared\S*)?"
)
_INTERNAL = re.compile(r"via (P2P|SHM|CUMEM|NVLS|direct)\b", re.IGNORECASE)
_GDR = re.compile(r"GPU Direct RDMA (?:\(\w+\) )?([Ee]nabled|[Dd]isabled)\b(.*)")
_GDR_SUMMARY = re.compile(r"Connected all (?:rings|trees).* GDR ([01])\b")
_VERSION = re.compile(r"(?:NCCL|RCCL) version ?:? ?v?([0-9]{1,3}\.[0-9]{1,3}(?:\.[0-9]{1,3})?)(?![0-9])")
_SOCKETS = re.compile(r"NET/Socket ?: Using (.+)")


@dataclass(frozen=True)
class Hop:
    """One end of a connection between nodes."""

    channel: int
    sender: int
    receiver: int
    direction: str
    network: str
    device: int | None
    direct: bool


@dataclass
class LogEvidence:
    """What a log shows about the network; lists are in the order of the log.

    Attributes:
        direct: the number of lines that report GPUDirect as "enabled" and as "disabled".
        why_not_direct: the first line that reports GPUDirect as disabled.
        reasons: (why a network is not used, the fix).
        internal: number of connections inside a node.
    """

    version: str = ""
    hops: list[Hop] = field(default_factory=list)
    direct: Counter[str] = field(default_factory=Counter)
    why_not_direct: str = ""
    sockets: str = ""
    reasons: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    internal: int = 0

    @property
    def gpu_direct(self) -> bool | None:
        """Whether all connections between nodes use GPUDirect; if the log has none, whether NCCL reports it as enabled."""
        between = [hop.direct for hop in self.hops if hop.network != "Socket"]
        if between:
            return all(between)
        if self.direct["enabled"] or self.direct["disabled"]:
            return not self.direct["disabled"]
        return None


def read_evidence(text: str) -> LogEvidence:
    """Return the evidence in a log; lines that are not from NCCL are ignored."""
    evidence = LogEvidence()
    for line in read_lines_with_hosts(text)[0]:
        if not evidence.version and (version := _VERSION.search(line.text)):
            evidence.version = version[1]
        if match := _MESSAGE.search(line.text):
            _add(evidence, match[1], match[2])
    return evidence


def _add(evidence: LogEvidence, level: str, message: str) -> None:
    if level == "WARN":
        evidence.warnings.append(message)
    if hop := _CHANNEL.search(message):
        device = int(hop[6]) if hop[6] else None
        is_direct = bool(hop[7]) and "GDRDMA" in hop[7]
        evidence.hops.append(Hop(int(hop[1]), int(hop[2]), int(hop[3]), hop[4], hop[5], device, is_direct))
    elif _INTERNAL.search(message):
        evidence.internal += 1
    if summary := _GDR_SUMMARY.search(message):
        evidence.direct["enabled" if summary[1] == "1" else "disabled"] += 1
    if direct_line := _GDR.search(message):
        state = direct_line[1].lower()
        evidence.direct[state] += 1
        if state == "disabled" and not evidence.why_not_direct:
            evidence.why_not_direct = message.strip()
    if sockets := _SOCKETS.search(message):
        evidence.sockets = evidence.sockets or sockets[1].strip()
    for reason in log_reasons():
        if re.search(reason.pattern, message) and (reason.why, reason.fix) not in evidence.reasons:
            evidence.reasons.append((reason.why, reason.fix))

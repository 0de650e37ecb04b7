"""What a log of NCCL's says of the network beyond the reader's facts: GPUDirect, connections, why there is no IB."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from toolkit.topology.readers.lines import read_lines_with_hosts

_SAID = re.compile(r"NCCL (INFO|WARN) (.*)")
_CHANNEL = re.compile(
    r"Channel ([0-9]{1,3})(?:/[0-9]+)? : ([0-9]{1,7})\[[^\]]*\] -> ([0-9]{1,7})\[[^\]]*\] \[(send|receive)\] "
    r"via NET/([^/\s]+)(?:/([0-9]{1,4})(?:\([0-9]+\))?)?(/GDRDMA\S*|/Shared\S*)?"
)
_INTERNAL = re.compile(r"via (P2P|SHM|CUMEM|NVLS|direct)\b", re.IGNORECASE)
_GDR = re.compile(r"GPU Direct RDMA (?:\(\w+\) )?([Ee]nabled|[Dd]isabled)\b(.*)")
_GDR_SUMMARY = re.compile(r"Connected all (?:rings|trees).* GDR ([01])\b")
_VERSION = re.compile(r"(?:NCCL|RCCL) version ?:? ?v?([0-9]{1,3}\.[0-9]{1,3}(?:\.[0-9]{1,3})?)(?![0-9])")
_SOCKETS = re.compile(r"NET/Socket ?: Using (.+)")
_REASONS = (
    (re.compile(r"Failed to open libibverbs"), "libibverbs cannot be loaded",
     "install rdma-core (libibverbs.so.1), in the container too"),
    (re.compile(r"NET/IB ?: No device found"), "NCCL found no adapter that it may use",
     "look at NCCL_IB_HCA, at the ports' states (ibstat), and whether the container sees /dev/infiniband"),
    (re.compile(r"NET/Plugin ?:? .*(?:Could not find|No plugin found)"), "no network plugin was found",
     "put the plugin's folder into LD_LIBRARY_PATH, where this fabric needs one (EFA, Slingshot)"),
)  # fmt: skip


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
    """All that was found, in the order of the log."""

    version: str = ""
    hops: list[Hop] = field(default_factory=list)
    direct: Counter[str] = field(default_factory=Counter)  # enabled, disabled: lines that say so
    direct_said: str = ""  # the first line that says why it is off
    sockets: str = ""
    reasons: list[tuple[str, str]] = field(default_factory=list)  # why a network is not used, and the fix
    warnings: list[str] = field(default_factory=list)
    internal: int = 0  # connections inside a node

    @property
    def gpu_direct(self) -> bool | None:
        """Whether connections between nodes go from GPU to NIC: what connections say, else what NCCL says of itself."""
        between = [hop.direct for hop in self.hops if hop.network not in ("Socket",)]
        if between:
            return all(between)
        if self.direct["enabled"] or self.direct["disabled"]:
            return not self.direct["disabled"]
        return None


def read_evidence(text: str) -> LogEvidence:
    """Read the whole log; lines that are not NCCL's are passed over."""
    evidence = LogEvidence()
    for line in read_lines_with_hosts(text)[0]:
        if not evidence.version and (version := _VERSION.search(line.text)):
            evidence.version = version[1]
        if said := _SAID.search(line.text):
            _take(evidence, said[1], said[2])
    return evidence


def _take(evidence: LogEvidence, level: str, said: str) -> None:
    if level == "WARN":
        evidence.warnings.append(said)
    if hop := _CHANNEL.search(said):
        device = int(hop[6]) if hop[6] else None
        direct = bool(hop[7]) and "GDRDMA" in hop[7]
        evidence.hops.append(Hop(int(hop[1]), int(hop[2]), int(hop[3]), hop[4], hop[5], device, direct))
    elif _INTERNAL.search(said):
        evidence.internal += 1
    if summary := _GDR_SUMMARY.search(said):
        evidence.direct["enabled" if summary[1] == "1" else "disabled"] += 1
    if direct_line := _GDR.search(said):
        state = direct_line[1].lower()
        evidence.direct[state] += 1
        if state == "disabled" and not evidence.direct_said:
            evidence.direct_said = said.strip()
    if sockets := _SOCKETS.search(said):
        evidence.sockets = evidence.sockets or sockets[1].strip()
    for pattern, why, fix in _REASONS:
        if pattern.search(said) and (why, fix) not in evidence.reasons:
            evidence.reasons.append((why, fix))

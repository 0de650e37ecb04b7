"""Is the network that a log shows the one that was planned? Else what is wrong, in words."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from toolkit.topology.nccl.finding import Finding
from toolkit.topology.nccl.log_evidence import LogEvidence
from toolkit.topology.nccl.node import AdapterPort, fast_ports
from toolkit.topology.nccl.variable import PAGE
from toolkit.topology.readers.nccl_log import NcclLog

TROUBLE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_MORE = "log from the start of the job with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV,GRAPH"


@dataclass(frozen=True)
class Plan:
    """What should be seen; empty or None is not asked for."""

    network: str = ""
    devices: tuple[str, ...] = ()
    devices_named: bool = False  # by a person, who is right against NCCL_IB_HCA
    gpu_direct: bool | None = None
    rails: bool = False  # each connection begins and ends at a NIC of the same number
    ports: tuple[AdapterPort, ...] | None = None  # what the nodes have


def plan_from_ports(ports: tuple[AdapterPort, ...]) -> Plan:
    """The plan that follows from a node's adapters: InfiniBand or RoCE over the fast ones that are active."""
    active = tuple(dict.fromkeys(port.adapter for port in fast_ports(ports)))
    return Plan(network="IB" if active else "", devices=active, ports=ports)


def check_log(log: NcclLog, evidence: LogEvidence, plan: Plan, where: str) -> tuple[list[Finding], list[str]]:
    """(findings, what is as planned in words)."""
    check = _Check(log, evidence, plan, where)
    check.network()
    check.devices()
    check.direct()
    check.rails()
    check.warnings()
    return check.findings, check.fine


def network_of(log: NcclLog, evidence: LogEvidence) -> str | None:
    """The network that NCCL says it uses, else the one that connections name."""
    names = {hop.network for hop in evidence.hops}
    return log.network or (names.pop() if len(names) == 1 else None)


class _Check:
    """One log against one plan."""

    def __init__(self, log: NcclLog, evidence: LogEvidence, plan: Plan, where: str) -> None:
        self.log, self.evidence, self.plan, self.where = log, evidence, plan, where
        self.used = network_of(log, evidence)
        same = log.rank_count is not None and log.rank_count == log.local_rank_count
        # A log of few lines says nothing of nodes; where it shows connections, all inside a node, there is one.
        inside = bool(evidence.internal) and not evidence.hops and len(log.hosts or ()) == 1
        self.one_node = 1 in (log.node_count, log.rank_count) or same or (inside and log.node_count is None)
        self.findings: list[Finding] = []
        self.fine: list[str] = []

    def _say(self, wrong: bool, why: str, fix: str, source: str = TROUBLE) -> None:
        self.findings.append(Finding("wrong" if wrong else "note", "", "", self.where, "", why, fix, source))

    def network(self) -> None:
        """The network between nodes."""
        if self.used is None:
            if self.plan.network and not self.one_node:
                why = f"no line says which network is used, and {self.plan.network} is expected: the log is cut"
                self._say(True, why, _MORE)
        elif self.plan.network and not _same_network(self.used, self.plan.network):
            self._other_network(self.used)
        elif self.used == "Socket" and not self.plan.network and not self.one_node:
            over = f" over {self.evidence.sockets[:80]}" if self.evidence.sockets else ""
            because = "".join(f"; {why}" for why, _ in self._why_not())
            fix = "give --expect-net IB, or --facts, where the nodes have a faster fabric"
            self._say(False, f"traffic between nodes goes over TCP{over}{because}", fix)
        else:
            self.fine.append(f"network {self.used}")

    def _other_network(self, used: str) -> None:
        active = [f"{port.adapter}:{port.port}" for port in self.plan.ports or () if port.active]
        reasons = self._why_not()
        because = "; ".join(why for why, _ in reasons) or "the log does not say why"
        fix = "; ".join(dict.fromkeys(fix for _, fix in reasons)) or _MORE
        although = f"although {len(active)} InfiniBand or RoCE ports are active ({', '.join(active[:8])})"
        expected = although if active and used == "Socket" else f"and {self.plan.network} is expected"
        self._say(True, f"NET/{used} is used {expected}: {because}", fix)

    def _why_not(self) -> list[tuple[str, str]]:
        """Why InfiniBand is not used, what was set first."""
        reasons = []
        environment = self.log.environment or {}
        if environment.get("NCCL_IB_DISABLE") == "1":
            reasons.append(("NCCL_IB_DISABLE=1 switches it off", "take NCCL_IB_DISABLE out"))
        if (forced := environment.get("NCCL_NET") or "").lower() == "socket":
            reasons.append((f"NCCL_NET={forced} forces sockets", "take NCCL_NET out"))
        chosen = environment.get("NCCL_IB_HCA")
        of_plugins = [reason for reason in self.evidence.reasons if "plugin" in reason[0]]
        # InfiniBand needs no plugin: that there is none says something only where nothing else does.
        others = [reason for reason in self.evidence.reasons if reason not in of_plugins]
        for why, fix in others or of_plugins:
            named = f" (NCCL_IB_HCA={chosen})" if chosen and "adapter" in why else ""
            reasons.append((why + named, fix))
        return reasons

    def devices(self) -> None:
        """The adapters."""
        if not self.plan.devices or not (self.used or "").startswith("IB"):
            return
        if self.log.devices is None:
            self._say(True, "no line says which adapters are used", _MORE)
            return
        missing = [name for name in self.plan.devices if name not in self.log.devices]
        more = [name for name in self.log.devices if name not in self.plan.devices]
        chosen = (self.log.environment or {}).get("NCCL_IB_HCA")
        blame = f"NCCL_IB_HCA={chosen} chose so: mend it" if chosen else None
        source = f"{PAGE}#nccl-ib-hca"
        wrong = self.plan.devices_named or not chosen
        if missing:
            why = f"{len(missing)} of {len(self.plan.devices)} planned adapters are not used: {', '.join(missing)}"
            self._say(wrong, why, blame or "look at their ports' states (ibstat), on every node", source)
        if more:
            why = f"adapters that are not planned are used: {', '.join(more)}"
            self._say(wrong, why, blame or f"NCCL_IB_HCA=={','.join(self.plan.devices)}", source)
        if not missing and not more:
            self.fine.append(f"adapters {', '.join(self.log.devices)}")

    def direct(self) -> None:
        """From GPU to NIC without host memory between them."""
        network = self.used or ""
        if network == "Socket" or (self.one_node and not self.evidence.hops):
            return
        direct = self.evidence.gpu_direct
        if direct is None:
            if self.plan.gpu_direct:
                self._say(
                    True, "no line says whether GPUDirect RDMA is used", "log with NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH"
                )
            return
        if direct and self.plan.gpu_direct is not False:
            self.fine.append("GPUDirect RDMA is used")
        elif direct:
            self._say(True, "GPUDirect RDMA is used, and was not expected", "NCCL_NET_GDR_LEVEL=LOC switches it off")
        else:
            hops = [hop for hop in self.evidence.hops if hop.network != "Socket"]
            count = sum(not hop.direct for hop in hops)
            of = f"{count} of {len(hops)} connections between nodes go through host memory" if hops else "it is off"
            said = f"; NCCL says: {self.evidence.direct_said[:160]}" if self.evidence.direct_said else ""
            fix = "load nvidia-peermem, or a driver with dma-buf; a NIC far from its GPU needs NCCL_NET_GDR_LEVEL=SYS"
            self._say(
                self.plan.gpu_direct is True,
                f"GPUDirect RDMA: {of}{said}",
                fix,
                f"{PAGE}#nccl-net-gdr-level-formerly-nccl-ib-gdr-level",
            )

    def rails(self) -> None:
        """Both ends of a connection, where the log has both, name their NIC."""
        ends: dict[tuple[int, int, int], dict[str, int]] = defaultdict(dict)
        for hop in self.evidence.hops:
            if hop.device is not None:
                ends[hop.channel, hop.sender, hop.receiver][hop.direction] = hop.device
        whole = {key: end for key, end in ends.items() if len(end) == 2}
        crossed = {key: end for key, end in whole.items() if end["send"] != end["receive"]}
        if crossed:
            (channel, sender, receiver), end = next(iter(crossed.items()))
            why = (
                f"{len(crossed)} of {len(whole)} connections cross rails, for instance channel {channel}, rank "
                f"{sender} to {receiver}: NIC {end['send']} to NIC {end['receive']}"
            )
            fix = (
                "NCCL_CROSS_NIC=0 where switches are one for each rail; the same GPUs on every node, in the same order"
            )
            self._say(self.plan.rails, why, fix, f"{PAGE}#nccl-cross-nic")
        elif whole:
            self.fine.append(f"{len(whole)} connections stay on their rails")
        elif self.plan.rails:
            self._say(
                True,
                "no connection is seen from both its ends",
                "give the logs of two nodes in one file, with INIT,NET,GRAPH",
            )

    def warnings(self) -> None:
        """What NCCL itself calls wrong, and a way between processes that ends at the node."""
        if said := self.evidence.warnings:
            often = f" {len(said)} times, first" if len(said) > 1 else ""
            why = f"NCCL warns{often}: {said[0][:200]}"
            self._say(True, why, "begin with this line: what follows it is its consequence")
        over = self.log.bootstrap_interface or ""
        if over.startswith(("docker", "virbr", "veth")):
            why = f"processes find each other over {over}, which does not leave the node"
            self._say(True, why, "set NCCL_SOCKET_IFNAME to the fabric's interface", f"{PAGE}#nccl-socket-ifname")


def _same_network(used: str, wanted: str) -> bool:
    """IBext_v8 is IB by a plugin; `AWS Libfabric` and OFI are one."""
    first, second = used.lower(), wanted.lower()
    ofi = ("ofi", "aws libfabric", "libfabric", "efa")
    return first.startswith(second) or (first in ofi and second in ofi)

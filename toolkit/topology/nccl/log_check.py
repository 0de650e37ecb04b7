"""Compare the network usage in an NCCL log with the expected usage."""

from collections import defaultdict
from dataclasses import dataclass

from toolkit.topology.nccl.finding import Finding
from toolkit.topology.nccl.log_evidence import LogEvidence
from toolkit.topology.nccl.node import AdapterPort, fast_ports
from toolkit.topology.nccl.variables import PAGE
from toolkit.topology.readers.nccl_log import NcclLog

__all__ = ["Plan", "check_log", "network_of", "plan_from_ports"]

TROUBLE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_GDR_LEVEL = f"{PAGE}#nccl-net-gdr-level-formerly-nccl-ib-gdr-level"
_MORE = "log from the start of the job with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV,GRAPH"


@dataclass(frozen=True)
class Plan:
    """The expected network use; toolkit does not check values that are empty or None.

    Attributes:
        devices_named: whether the user named the devices, which overrides NCCL_IB_HCA.
        rails: whether each connection must start and end at NICs with the same number.
        ports: the adapter ports of the nodes.
    """

    network: str = ""
    devices: tuple[str, ...] = ()
    devices_named: bool = False
    gpu_direct: bool | None = None
    rails: bool = False
    ports: tuple[AdapterPort, ...] | None = None


def plan_from_ports(ports: tuple[AdapterPort, ...]) -> Plan:
    """Return the plan for a node with these ports: InfiniBand or RoCE over the fast active ports."""
    active = tuple(dict.fromkeys(port.adapter for port in fast_ports(ports)))
    return Plan(network="IB" if active else "", devices=active, ports=ports)


def check_log(log: NcclLog, evidence: LogEvidence, plan: Plan, where: str) -> tuple[list[Finding], list[str]]:
    """Return (findings, descriptions of what is as expected)."""
    check = _Check(log, evidence, plan, where)
    for part in (check.network, check.devices, check.direct, check.rails, check.warnings):
        part()
    return check.findings, check.fine


def network_of(log: NcclLog, evidence: LogEvidence) -> str | None:
    """Return the network that NCCL reports as used, else the only one that connections name; None if unknown."""
    names = {hop.network for hop in evidence.hops}
    return log.network or (names.pop() if len(names) == 1 else None)


class _Check:
    """The comparison of one log with one plan."""

    def __init__(self, log: NcclLog, evidence: LogEvidence, plan: Plan, where: str) -> None:
        self.log, self.evidence, self.plan, self.where = log, evidence, plan, where
        self.used = network_of(log, evidence)
        is_local = log.rank_count is not None and log.rank_count == log.local_rank_count
        # A short log may not contain the number of nodes; without connections between nodes, there is only one.
        is_inside = bool(evidence.internal) and not evidence.hops and len(log.hosts or ()) == 1
        self.one_node = 1 in (log.node_count, log.rank_count) or is_local or (is_inside and log.node_count is None)
        self.findings: list[Finding] = []
        self.fine: list[str] = []

    def _report(self, is_wrong: bool, why: str, fix: str, source: str = TROUBLE) -> None:
        self.findings.append(Finding("wrong" if is_wrong else "note", "", "", self.where, "", why, fix, source))

    def network(self) -> None:
        """Check the network between nodes."""
        if self.used is None:
            if self.plan.network and not self.one_node:
                why = (
                    f"expected network {self.plan.network}, but no line names the network in use: the log is incomplete"
                )
                self._report(True, why, _MORE)
        elif self.plan.network and not _same_network(self.used, self.plan.network):
            self._other_network(self.used)
        elif self.used == "Socket" and not self.plan.network and not self.one_node:
            over = f" on {self.evidence.sockets[:80]}" if self.evidence.sockets else ""
            because = "".join(f"; {why}" for why, _ in self._why_no_infiniband())
            fix = "pass --expect-net IB, or --facts, if the nodes have a faster fabric"
            self._report(False, f"traffic between nodes uses TCP{over}{because}", fix)
        else:
            self.fine.append(f"network {self.used}")

    def _other_network(self, used: str) -> None:
        active = [f"{port.adapter}:{port.port}" for port in self.plan.ports or () if port.active]
        reasons = self._why_no_infiniband()
        because = "; ".join(why for why, _ in reasons) or "the log does not contain the reason"
        fix = "; ".join(dict.fromkeys(fix for _, fix in reasons)) or _MORE
        although = f"although {len(active)} InfiniBand or RoCE ports are active ({', '.join(active[:8])})"
        expected = although if active and used == "Socket" else f"but {self.plan.network} is expected"
        self._report(True, f"NET/{used} is used {expected}: {because}", fix)

    def _why_no_infiniband(self) -> list[tuple[str, str]]:
        """Return the reasons why InfiniBand is not used, each with its fix; settings come first."""
        reasons = []
        environment = self.log.environment or {}
        if environment.get("NCCL_IB_DISABLE") == "1":
            reasons.append(("NCCL_IB_DISABLE=1 disables InfiniBand and RoCE", "remove NCCL_IB_DISABLE"))
        if (forced := environment.get("NCCL_NET") or "").lower() == "socket":
            reasons.append((f"NCCL_NET={forced} forces sockets", "remove NCCL_NET"))
        chosen = environment.get("NCCL_IB_HCA")
        of_plugins = [reason for reason in self.evidence.reasons if "plugin" in reason[0]]
        # InfiniBand does not need a plugin, so a missing plugin is a reason only if there is no other.
        others = [reason for reason in self.evidence.reasons if reason not in of_plugins]
        for why, fix in others or of_plugins:
            named = f" (NCCL_IB_HCA={chosen})" if chosen and "adapter" in why else ""
            reasons.append((why + named, fix))
        return reasons

    def devices(self) -> None:
        """Check the adapters in use."""
        if not self.plan.devices or not (self.used or "").startswith("IB"):
            return
        if self.log.devices is None:
            self._report(True, "the log does not show which adapters are used", _MORE)
            return
        missing = [name for name in self.plan.devices if name not in self.log.devices]
        more = [name for name in self.log.devices if name not in self.plan.devices]
        chosen = (self.log.environment or {}).get("NCCL_IB_HCA")
        fix_choice = f"fix NCCL_IB_HCA={chosen}, which selected these adapters" if chosen else None
        source = f"{PAGE}#nccl-ib-hca"
        is_wrong = self.plan.devices_named or not chosen
        if missing:
            why = f"{len(missing)} of {len(self.plan.devices)} expected adapters are not used: {', '.join(missing)}"
            self._report(is_wrong, why, fix_choice or "check the states of their ports (ibstat) on every node", source)
        if more:
            why = f"unexpected adapters are used: {', '.join(more)}"
            self._report(is_wrong, why, fix_choice or f"NCCL_IB_HCA=={','.join(self.plan.devices)}", source)
        if not missing and not more:
            self.fine.append(f"adapters {', '.join(self.log.devices)}")

    def direct(self) -> None:
        """Check GPUDirect RDMA, which transfers data between GPU and NIC without a copy in host memory."""
        if self.used == "Socket" or (self.one_node and not self.evidence.hops):
            return
        is_direct = self.evidence.gpu_direct
        if is_direct is None:
            if self.plan.gpu_direct:
                fix = "create the log with NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH"
                self._report(True, "the log does not show whether GPUDirect RDMA is used", fix)
        elif is_direct and self.plan.gpu_direct is not False:
            self.fine.append("GPUDirect RDMA is used")
        elif is_direct:
            fix = "set NCCL_NET_GDR_LEVEL=LOC to disable GPUDirect RDMA"
            self._report(True, "GPUDirect RDMA is used, but was expected not to be", fix)
        else:
            hops = [hop for hop in self.evidence.hops if hop.network != "Socket"]
            count = sum(not hop.direct for hop in hops)
            extent = f"{count} of {len(hops)} connections between nodes use host memory" if hops else "disabled"
            quote = f"; NCCL logs: {self.evidence.why_not_direct[:160]}" if self.evidence.why_not_direct else ""
            fix = (
                "load nvidia-peermem or a driver with dma-buf; set NCCL_NET_GDR_LEVEL=SYS if a NIC is far from its GPU"
            )
            self._report(self.plan.gpu_direct is True, f"GPUDirect RDMA: {extent}{quote}", fix, _GDR_LEVEL)

    def rails(self) -> None:
        """Check that connections stay on one rail: that the NICs at both ends have the same number."""
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
            fix = "if each rail has its own switch, set NCCL_CROSS_NIC=0; use the same GPUs in the same order on every node"
            self._report(self.plan.rails, why, fix, f"{PAGE}#nccl-cross-nic")
        elif whole:
            self.fine.append(f"{len(whole)} connections stay on their rails")
        elif self.plan.rails:
            fix = "pass the logs of two nodes in one file, created with NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH"
            self._report(True, "the log does not show both ends of any connection", fix)

    def warnings(self) -> None:
        """Report warnings from NCCL, and a bootstrap interface that cannot reach other nodes."""
        if warnings := self.evidence.warnings:
            count = f" {len(warnings)} times, first" if len(warnings) > 1 else ""
            why = f"NCCL warns{count}: {warnings[0][:200]}"
            self._report(True, why, "fix the cause of this warning first: later ones are usually its consequences")
        over = self.log.bootstrap_interface or ""
        if over.startswith(("docker", "virbr", "veth")):
            why = f"the ranks connect over {over}, which does not reach other nodes"
            self._report(True, why, "set NCCL_SOCKET_IFNAME to the fabric interface", f"{PAGE}#nccl-socket-ifname")


def _same_network(used: str, wanted: str) -> bool:
    """Return whether two names mean the same network: IBext_v8 is a plugin for IB, and `AWS Libfabric` is OFI."""
    first, second = used.lower(), wanted.lower()
    ofi = ("ofi", "aws libfabric", "libfabric", "efa")
    return first.startswith(second) or (first in ofi and second in ofi)

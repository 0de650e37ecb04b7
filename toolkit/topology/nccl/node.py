"""What the settings of the fabric need to know of a node: interfaces, default route, ports of adapters, GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.topology.sources.infiniband_files import is_active, measured_rate, read_adapters
from toolkit.topology.sources.kernel_files import SYSTEM_ROOT
from toolkit.world.address import interface_addresses

_VIRTUAL = ("docker", "virbr", "veth", "br-", "cni", "flannel", "lo")


@dataclass(frozen=True)
class AdapterPort:
    """One port of an InfiniBand or RoCE adapter; what is not known is None."""

    adapter: str
    port: int
    active: bool | None
    rate_gb_per_s: float | None
    link_layer: str | None


@dataclass(frozen=True)
class FabricNode:
    """Plain facts of one node, from which its settings follow.

    Attributes:
        nodes: how many nodes the run has.
        gpus: how many GPUs the ranks of the node may use.
        interface: the one over which ranks meet: the site's, else the one that was chosen.
        interfaces: all that have an IPv4 address.
        default_route: the interface of the default route; empty where there is none.
        ports: of its adapters; None where nobody could ask.
    """

    nodes: int
    gpus: int
    interface: str
    interfaces: tuple[str, ...]
    default_route: str
    ports: tuple[AdapterPort, ...] | None

    @property
    def outer_interfaces(self) -> tuple[str, ...]:
        """Those that can reach other nodes, as far as names tell."""
        return tuple(name for name in self.interfaces if not name.startswith(_VIRTUAL))


def fast_ports(ports: tuple[AdapterPort, ...]) -> list[AdapterPort]:
    """The active ports above half the fastest one's rate; all active ones where a rate is not known."""
    active = [port for port in ports if port.active]
    rates = [port.rate_gb_per_s for port in active if port.rate_gb_per_s is not None]
    if not rates or len(rates) < len(active):
        return active
    return [port for port in active if 2 * (port.rate_gb_per_s or 0) > max(rates)]


def read_ports(root: Path = SYSTEM_ROOT) -> tuple[AdapterPort, ...] | None:
    """The ports that the kernel lists, without a command; None where it has no such list."""
    adapters, _ = read_adapters(root)  # `topo show` tells of damage: here it is unknown what stands there
    if adapters is None:
        return None
    return tuple(
        AdapterPort(adapter.name, port.number, is_active(port), measured_rate(port), port.link_layer)
        for adapter in adapters
        for port in adapter.ports
    )


def read_default_route(table: Path = Path("/proc/net/route")) -> str:
    """The interface of the default route of IPv4 with the least metric; empty where there is none."""
    try:
        rows = [line.split() for line in table.read_text(encoding="utf-8").splitlines()[1:]]
    except OSError:
        return ""
    routes = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == "00000000" and row[7] == "00000000"]
    return min(routes)[1] if routes else ""


def read_node(interface: str, nodes: int, gpus: int) -> FabricNode:
    """The facts of this node; `interface` is the one that was chosen for the ranks."""
    return FabricNode(
        nodes=nodes,
        gpus=gpus,
        interface=interface,
        interfaces=tuple(interface_addresses()),
        default_route=read_default_route(),
        ports=read_ports(),
    )

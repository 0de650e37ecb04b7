"""Read the facts of a node that determine NCCL settings: interfaces, default route, adapter ports, GPUs."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.topology.sources.kernel_files import SYSTEM_ROOT, is_active, measured_rate, read_adapters
from toolkit.world.address import interface_addresses

__all__ = ["AdapterPort", "read_facts_file", "read_node", "read_ports"]

_VIRTUAL = ("docker", "virbr", "veth", "br-", "cni", "flannel", "lo")


@dataclass(frozen=True)
class AdapterPort:
    """One port of an InfiniBand or RoCE adapter; an unknown value is None. The rate is in Gbit/s."""

    adapter: str
    port: int
    active: bool | None
    rate_gbit_per_s: float | None
    link_layer: str | None


@dataclass(frozen=True)
class FabricNode:
    """Facts of one node.

    Attributes:
        nodes: number of nodes of the run.
        gpus: number of GPUs that the ranks of the node may use.
        interface: the interface for the rendezvous: the one in the site file, else the one that toolkit chose.
        interfaces: all interfaces with an IPv4 address.
        default_route: the interface of the default route; empty if there is none.
        ports: the adapter ports; None if unknown.
    """

    nodes: int
    gpus: int
    interface: str
    interfaces: tuple[str, ...]
    default_route: str
    ports: tuple[AdapterPort, ...] | None

    @property
    def outer_interfaces(self) -> tuple[str, ...]:
        """The interfaces that can probably reach other nodes, judging by their names."""
        return tuple(name for name in self.interfaces if not name.startswith(_VIRTUAL))


def fast_ports(ports: tuple[AdapterPort, ...]) -> list[AdapterPort]:
    """Return the active ports with more than half the fastest rate; all active ports if a rate is unknown."""
    active = [port for port in ports if port.active]
    rates = [port.rate_gbit_per_s for port in active if port.rate_gbit_per_s is not None]
    if not rates or len(rates) < len(active):
        return active
    return [port for port in active if 2 * (port.rate_gbit_per_s or 0) > max(rates)]


def read_ports(root: Path = SYSTEM_ROOT) -> tuple[AdapterPort, ...] | None:
    """Return the ports that the kernel lists in /sys; None if it does not list any adapters."""
    adapters, _ = read_adapters(root)  # only `topo show` reports the warnings; here an invalid value is unknown
    if adapters is None:
        return None
    return tuple(
        AdapterPort(adapter.name, port.number, is_active(port), measured_rate(port), port.link_layer)
        for adapter in adapters
        for port in adapter.ports
    )


def read_facts_file(path: Path) -> tuple[AdapterPort, ...]:
    """Return the adapter ports of all nodes in a `topo show --json` file, once per adapter name and port number.

    Raises:
        ToolkitError: the file is not readable or not valid, or the adapters of a node are unknown.
    """
    # Imported here because every rank imports this module, and pydantic is slow to import.
    from toolkit.topology.topology_json import read_topology

    fix = "pass the output of `toolkit topo show --json` on a compute node"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ToolkitError(f"cannot read the file: {error.strerror}", where=str(path), fix=fix) from error
    except UnicodeDecodeError as error:
        raise ToolkitError("expected JSON in UTF-8", where=str(path), fix=fix) from error
    ports: dict[tuple[str, int], AdapterPort] = {}
    for node in read_topology(text, str(path)).nodes:
        nics = node.hardware.nics
        if nics.value is None:
            message = f"the file does not contain the adapters of a node: {nics.missing[:200]}"
            raise ToolkitError(message, where=str(path), fix=fix)
        for nic in nics.value:
            for port in nic.ports:
                state, rate = port.state.value, port.rate_gbit_per_s.value
                is_active = None if state is None else state.casefold() == "active"
                found = AdapterPort(nic.name, port.number, is_active, rate, port.link_layer.value)
                ports.setdefault((nic.name, port.number), found)
    return tuple(ports.values())


def read_default_route(table: Path = Path("/proc/net/route")) -> str:
    """Return the interface of the IPv4 default route with the lowest metric; "" if there is none."""
    try:
        rows = [line.split() for line in table.read_text(encoding="utf-8").splitlines()[1:]]
    except OSError:
        return ""
    routes = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == "00000000" and row[7] == "00000000"]
    return min(routes)[1] if routes else ""


def read_node(interface: str, nodes: int, gpus: int) -> FabricNode:
    """Return the facts of this node; `interface` is the interface for the rendezvous."""
    return FabricNode(nodes, gpus, interface, tuple(interface_addresses()), read_default_route(), read_ports())

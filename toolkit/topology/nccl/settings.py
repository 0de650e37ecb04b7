"""Choose the network variables that toolkit sets for ranks, and why: those whose default is unsuitable.

docs/fabric.md lists the variables that toolkit does not set, and why.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.topology.nccl.device_lists import TORCH_INTERFACES
from toolkit.topology.nccl.node import AdapterPort, FabricNode, fast_ports
from toolkit.topology.nccl.variables import PAGE

__all__ = ["FabricSetting", "fabric_settings"]

_CUDA = "https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html"


@dataclass(frozen=True)
class FabricSetting:
    """A variable for the ranks. `kept` is the value that the user, the job or the site set, which overrides `value`."""

    name: str
    value: str
    reason: str
    source: str
    kept: str | None = None

    @property
    def line(self) -> str:
        """The setting as a line of the log."""
        if self.kept is not None:
            return f"{self.name}={self.kept} is already set, so toolkit does not set {self.value}: {self.reason}"
        return f"{self.name}={self.value}: {self.reason}"


def fabric_settings(node: FabricNode, given: Mapping[str, str]) -> list[FabricSetting]:
    """Return the settings for a node.

    Args:
        given: the variables that the user, the job or the site set. They are kept, even if they are empty.
    """
    wanted = [*_interfaces(node), *_adapters(node), *_gpus(node)]
    return [FabricSetting(name, value, reason, source, given.get(name)) for name, value, reason, source in wanted]


Wanted = tuple[str, str, str, str]


def _interfaces(node: FabricNode) -> list[Wanted]:
    """Return the settings for the interface of the rendezvous, for gloo and NCCL."""
    if not node.interface:
        return []
    rendezvous = f"the rendezvous uses {node.interface}"
    if node.default_route and node.default_route != node.interface:
        rendezvous += f", the default route is {node.default_route}"
    reason = f"{rendezvous}; by default, gloo uses the address of the host name, which is often loopback"
    wanted = [("GLOO_SOCKET_IFNAME", node.interface, reason, TORCH_INTERFACES)]
    others = [name for name in node.outer_interfaces if name != node.interface]
    if node.gpus and others and node.nodes > 1:
        reason = f"{rendezvous}; NCCL could also use {', '.join(others[:4])}, and without `=` the name is a prefix"
        wanted.append(("NCCL_SOCKET_IFNAME", f"={node.interface}", reason, f"{PAGE}#nccl-socket-ifname"))
    return wanted


def _adapters(node: FabricNode) -> list[Wanted]:
    """Select the fast adapters if slower ports are active as well, since a slow port delays every ring that uses it."""
    active = [port for port in node.ports or () if port.active]
    chosen = fast_ports(node.ports or ())
    slow = [port for port in active if port not in chosen]
    if node.nodes < 2 or not node.gpus or not slow:
        return []
    fastest = max(port.rate_gbit_per_s or 0 for port in chosen)
    names = ",".join(dict.fromkeys(_name(port, active, chosen) for port in chosen))
    listed = ", ".join(f"{port.adapter}:{port.port} ({port.rate_gbit_per_s:g} Gbit/s)" for port in slow)
    reason = (
        f"{listed}: slower than other adapters ({fastest:g} Gbit/s), but NCCL would use all of them; `=` because mlx5_1 "
        "also matches mlx5_10"
    )
    return [("NCCL_IB_HCA", f"={names}", reason, f"{PAGE}#nccl-ib-hca")]


def _name(port: AdapterPort, active: list[AdapterPort], chosen: list[AdapterPort]) -> str:
    """Return the adapter name, with the port number if another active port of the adapter is excluded."""
    is_whole = all(other in chosen for other in active if other.adapter == port.adapter)
    return port.adapter if is_whole else f"{port.adapter}:{port.port}"


def _gpus(node: FabricNode) -> list[Wanted]:
    """Return the settings for the numbering of GPUs and for the NCCL log."""
    wanted = []
    if node.gpus > 1:
        reason = "CUDA numbers the fastest GPU first, nvidia-smi by PCI bus: cuda:1 may differ from GPU 1 in nvidia-smi"
        wanted.append(("CUDA_DEVICE_ORDER", "PCI_BUS_ID", reason, _CUDA))
    if node.gpus:
        reason = "without it, a failed call reports only `unhandled system error`; WARN adds the version and the cause"
        wanted.append(("NCCL_DEBUG", "WARN", reason, f"{PAGE}#nccl-debug"))
    return wanted

"""The variables that toolkit sets for ranks, each with its reason: only those with a wrong default.

docs/fabric.md lists the variables that toolkit leaves to NCCL, and why.
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
    """A variable for the ranks. `kept` is the value that the user, job or site has set: it overrides `value`."""

    name: str
    value: str
    reason: str
    source: str
    kept: str | None = None

    @property
    def line(self) -> str:
        """The setting as a line for people."""
        if self.kept is not None:
            return f"{self.name}={self.kept} is already set, and kept; otherwise {self.value}: {self.reason}"
        return f"{self.name}={self.value}: {self.reason}"


def fabric_settings(node: FabricNode, given: Mapping[str, str]) -> list[FabricSetting]:
    """The settings that follow from the facts of a node.

    Args:
        given: what the user, job or site has set, which is kept even if it is empty.
    """
    wanted = [*_interfaces(node), *_adapters(node), *_gpus(node)]
    return [FabricSetting(name, value, reason, source, given.get(name)) for name, value, reason, source in wanted]


Wanted = tuple[str, str, str, str]


def _interfaces(node: FabricNode) -> list[Wanted]:
    """The interface of the rendezvous, for gloo and NCCL."""
    if not node.interface:
        return []
    rendezvous = f"ranks meet over {node.interface}"
    if node.default_route and node.default_route != node.interface:
        rendezvous += f", the default route is {node.default_route}"
    reason = f"{rendezvous}; gloo would use the address of the host's own name, which is often loopback"
    wanted = [("GLOO_SOCKET_IFNAME", node.interface, reason, TORCH_INTERFACES)]
    others = [name for name in node.outer_interfaces if name != node.interface]
    if node.gpus and others and node.nodes > 1:
        reason = f"{rendezvous}; NCCL could also use {', '.join(others[:4])}, and without `=` the name is a prefix"
        wanted.append(("NCCL_SOCKET_IFNAME", f"={node.interface}", reason, f"{PAGE}#nccl-socket-ifname"))
    return wanted


def _adapters(node: FabricNode) -> list[Wanted]:
    """The fast adapters, if others are active: a slow port, or one on another network, delays each ring across it."""
    active = [port for port in node.ports or () if port.active]
    chosen = fast_ports(node.ports or ())
    slow = [port for port in active if port not in chosen]
    if node.nodes < 2 or not node.gpus or not slow:
        return []
    fastest = max(port.rate_gb_per_s or 0 for port in chosen)
    names = ",".join(dict.fromkeys(_name(port, active, chosen) for port in chosen))
    listed = ", ".join(f"{port.adapter}:{port.port} ({port.rate_gb_per_s:g} Gbit/s)" for port in slow)
    reason = (
        f"{listed} beside adapters of {fastest:g} Gbit/s, and NCCL would use all; with `=`, since mlx5_1 also matches "
        "mlx5_10"
    )
    return [("NCCL_IB_HCA", f"={names}", reason, f"{PAGE}#nccl-ib-hca")]


def _name(port: AdapterPort, active: list[AdapterPort], chosen: list[AdapterPort]) -> str:
    """The adapter's name, with the port if another active port of the adapter is excluded."""
    is_whole = all(other in chosen for other in active if other.adapter == port.adapter)
    return port.adapter if is_whole else f"{port.adapter}:{port.port}"


def _gpus(node: FabricNode) -> list[Wanted]:
    """The numbering of GPUs, and NCCL's log."""
    wanted = []
    if node.gpus > 1:
        reason = "`nvidia-smi` numbers GPUs by bus, CUDA the fastest first: cuda:1 could be a GPU with another number"
        wanted.append(("CUDA_DEVICE_ORDER", "PCI_BUS_ID", reason, _CUDA))
    if node.gpus:
        reason = "without it a failed call reports only `unhandled system error`; WARN adds the version and the cause"
        wanted.append(("NCCL_DEBUG", "WARN", reason, f"{PAGE}#nccl-debug"))
    return wanted

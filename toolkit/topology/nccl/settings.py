"""The few variables that the toolkit sets for ranks, each with its reason: only where a default is wrong.

What a user or site has set is kept. Everything else is left to NCCL, whose choices follow the machine better than a
table of ours could; docs/fabric.md says what was left alone, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.topology.nccl.node import AdapterPort, FabricNode, fast_ports
from toolkit.topology.nccl.variable import PAGE

_TORCH = "https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use"
_CUDA = "https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html"


@dataclass(frozen=True)
class FabricSetting:
    """A variable for the ranks. `kept` is what somebody else has set: it stays, whatever `value` is."""

    name: str
    value: str
    reason: str
    source: str
    kept: str | None = None

    @property
    def line(self) -> str:
        """The setting for people."""
        if self.kept is not None:
            return f"{self.name}={self.kept} is kept as it was set; it would be {self.value}: {self.reason}"
        return f"{self.name}={self.value}: {self.reason}"


def fabric_settings(node: FabricNode, given: Mapping[str, str]) -> list[FabricSetting]:
    """The settings that follow from the facts of a node.

    Args:
        given: what the user, job or site has set; it wins, also when it is empty.
    """
    wanted = [*_interfaces(node), *_adapters(node), *_gpus(node)]
    return [FabricSetting(name, value, reason, source, given.get(name)) for name, value, reason, source in wanted]


def to_set(settings: list[FabricSetting]) -> dict[str, str]:
    """The variables that nobody else has set."""
    return {setting.name: setting.value for setting in settings if setting.kept is None}


Wanted = tuple[str, str, str, str]


def _interfaces(node: FabricNode) -> list[Wanted]:
    """gloo asks the name service for this host's own name, NCCL takes all interfaces that look well."""
    if not node.interface:
        return []
    said = f"ranks meet over {node.interface}"
    if node.default_route and node.default_route != node.interface:
        said += f", the default route is {node.default_route}"
    wanted = [
        ("GLOO_SOCKET_IFNAME", node.interface,
         f"{said}; gloo would take the address of the host's own name, which is often loopback", _TORCH)
    ]  # fmt: skip
    others = [name for name in node.outer_interfaces if name != node.interface]
    if node.gpus and others and node.nodes > 1:
        reason = f"{said}; NCCL could take {', '.join(others[:4])} too, and without `=` every name that begins so"
        wanted.append(("NCCL_SOCKET_IFNAME", f"={node.interface}", reason, f"{PAGE}#nccl-socket-ifname"))
    return wanted


def _adapters(node: FabricNode) -> list[Wanted]:
    """NCCL takes every active port; one that is slow, or on another network, holds up a ring that crosses it."""
    active = [port for port in node.ports or () if port.active]
    chosen = fast_ports(node.ports or ())
    left = [port for port in active if port not in chosen]
    if node.nodes < 2 or not node.gpus or not left:
        return []
    fastest = max(port.rate_gb_per_s or 0 for port in chosen)
    names = ",".join(dict.fromkeys(_name(port, active, chosen) for port in chosen))
    slow = ", ".join(f"{port.adapter}:{port.port} ({port.rate_gb_per_s:g} Gbit/s)" for port in left)
    reason = (
        f"{slow} beside adapters of {fastest:g} Gbit/s, and NCCL would use all; `=` since mlx5_1 also means mlx5_10"
    )
    return [("NCCL_IB_HCA", f"={names}", reason, f"{PAGE}#nccl-ib-hca")]


def _name(port: AdapterPort, active: list[AdapterPort], chosen: list[AdapterPort]) -> str:
    """The adapter, with its port where another active port of it is left out."""
    whole = all(other in chosen for other in active if other.adapter == port.adapter)
    return port.adapter if whole else f"{port.adapter}:{port.port}"


def _gpus(node: FabricNode) -> list[Wanted]:
    wanted = []
    if node.gpus > 1:
        reason = "`nvidia-smi` numbers GPUs by their bus, CUDA the fastest first: cuda:1 could be another GPU's number"
        wanted.append(("CUDA_DEVICE_ORDER", "PCI_BUS_ID", reason, _CUDA))
    if node.gpus:
        reason = (
            "without it a call that fails says only `unhandled system error`; WARN adds the version, and what failed"
        )
        wanted.append(("NCCL_DEBUG", "WARN", reason, f"{PAGE}#nccl-debug"))
    return wanted

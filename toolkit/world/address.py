"""Choose the network interface and address at which other nodes reach this one."""

import fcntl
import socket
import struct

from toolkit.errors import ToolkitError

__all__ = ["choose_interface", "interface_addresses"]

_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
_VIRTUAL = ("docker", "virbr", "veth", "br-", "cni", "flannel")


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one, in the kernel's order."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no IPv4 address
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def choose_interface(wanted: str, *, single_node: bool) -> tuple[str, str]:
    """Return (interface, IPv4 address) for rendezvous and sockets.

    Order: the site's `network.interface`; loopback for a run on one node; the interface to which this host's own name
    resolves; the first interface that is neither loopback nor virtual.

    Raises:
        ToolkitError: the configured interface does not exist, or no interface is usable.
    """
    addresses = interface_addresses()
    if wanted:
        if wanted in addresses:
            return wanted, addresses[wanted]
        raise ToolkitError(
            f"{socket.gethostname()} has no interface {wanted!r} with an IPv4 address",
            where="network.interface",
            fix=f"use one of {', '.join(addresses)}",
        )
    if single_node:
        return next(((name, at) for name, at in addresses.items() if at.startswith("127.")), ("lo", "127.0.0.1"))
    outside = {name: at for name, at in addresses.items() if not at.startswith("127.")}
    own = _own_name_address()
    for name, at in outside.items():
        if at == own:
            return name, at
    for name, at in outside.items():
        if not name.startswith(_VIRTUAL):
            return name, at
    raise ToolkitError(
        f"no interface of {socket.gethostname()} reaches other nodes (found {', '.join(addresses) or 'none'})",
        where="network.interface",
        fix="set network.interface in the site file to the fabric's interface",
    )


def _own_name_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # the host cannot resolve its own name; the caller tries the interfaces
        return ""

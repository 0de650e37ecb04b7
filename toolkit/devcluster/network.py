"""The network of a dev cluster: a bridge on this host, and a link (veth pair) with its own speed to each node."""

import json
import re
from ipaddress import IPv4Network

from toolkit.devcluster.layout import ClusterSpec, Layout, layout_beside
from toolkit.devcluster.processes import run_program, wait_until
from toolkit.errors import OwnFailureError, ToolkitError

# The node's end of its link.
NODE_INTERFACE = "eth0"
# The controller's end of its link to the cluster whose slurmdbd it shares.
ACCOUNTING_INTERFACE = "eth1"
CABLES_GONE_S = 5.0
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def free_subnet(layout: Layout) -> str:
    """Return the first three bytes of a subnet from 10.64.0/24 to 10.127.255/24 that no route of this host covers."""
    routes = json.loads(run_program(["ip", "-json", "route", "show", "table", "all", "type", "unicast"]))
    taken = [IPv4Network(route["dst"], strict=False) for route in routes if _is_network(route["dst"])]
    count = 2**14
    for offset in range(count):
        number = (layout.first_subnet + offset) % count
        subnet = f"10.{64 + number // 256}.{number % 256}"
        network = IPv4Network(f"{subnet}.0/24")
        if not any(network.overlaps(other) for other in taken):
            return subnet
    raise OwnFailureError("no free subnet: the routes of this host cover all of 10.64.0.0/10")


def _is_network(destination: str) -> bool:
    return re.fullmatch(r"[\d.]+(/\d+)?", destination) is not None


def links(layout: Layout) -> dict[str, bool]:
    """Return the links of the cluster on this host, each with True if it is up."""
    links_of_host = json.loads(run_program(["ip", "-json", "link", "show"]))
    return {link["ifname"]: "UP" in link["flags"] for link in links_of_host if link["ifname"].startswith(layout.bridge)}


def make_bridge(layout: Layout, spec: ClusterSpec) -> None:
    """Create the bridge, with this host's address on it, unless it exists."""
    if layout.bridge in links(layout):
        return
    _ip(
        f"link add {layout.bridge} type bridge",
        f"address add {spec.host_address}/24 dev {layout.bridge}",
        f"link set {layout.bridge} up",
    )


def connect_node(layout: Layout, spec: ClusterSpec, node: str, first: int) -> None:
    """Connect the bridge to the node whose first process is `first`."""
    _lay_cable(layout, layout.link(node), layout.bridge, NODE_INTERFACE, spec.node_address(node), first)
    _ip("link set lo up", inside=first)


def connect_to_accounting(layout: Layout, spec: ClusterSpec, first: int) -> None:
    """Connect the controller, whose first process is `first`, to the cluster whose slurmdbd it shares."""
    bridge = layout_beside(spec.accounting_of).bridge
    _lay_cable(layout, layout.link_to_accounting(), bridge, ACCOUNTING_INTERFACE, spec.seat, first)


def _lay_cable(layout: Layout, link: str, bridge: str, interface: str, address: str, first: int) -> None:
    if link in links(layout):
        _ip(f"link delete {link}")
    _ip(
        f"link add {link} type veth peer name {interface} netns {first}",
        f"link set {link} master {bridge}",
        f"link set {link} up",
    )
    _ip(f"address add {address}/24 dev {interface}", f"link set {interface} up", inside=first)


def remove_links(layout: Layout) -> None:
    """Remove the bridge and remaining links. A link disappears shortly after its node."""
    wait_until(lambda: set(links(layout)) <= {layout.bridge}, CABLES_GONE_S)
    _ip(*(f"link delete {name}" for name in links(layout)))


def switch_link(layout: Layout, node: str, *, on: bool) -> None:
    """Bring the link of a node up or down."""
    _ip(f"link set {layout.link(node)} {'up' if on else 'down'}")


def bits_per_second(rate: str) -> float:
    """Convert a rate in the format of tc. Raises ToolkitError unless it is a number with kbit, mbit or gbit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ToolkitError(f"{rate!r} is not a valid link speed", fix="use kbit, mbit or gbit, as in 200mbit")
    return float(match[1]) * _UNITS[match[2]]


def shape_link(layout: Layout, node: str, first: int, rate: str) -> None:
    """Limit both directions of a node's link to `rate` ("200mbit"); "none" removes the limit.

    The token bucket holds 10 ms of traffic, and at least two packets of the largest size, 64 KiB (tc-tbf(8)).
    """
    ends = ((["tc"], layout.link(node)), (["nsenter", f"--target={first}", "--net", "tc"], NODE_INTERFACE))
    if rate == "none":
        for tc, device in ends:
            if "tbf" in run_program([*tc, "qdisc", "show", "dev", device]):
                run_program([*tc, "qdisc", "delete", "dev", device, "root"])
        return
    burst_bytes = max(int(bits_per_second(rate) / 8 * 0.010), 2 * 64 * 1024)
    for tc, device in ends:
        arguments = f"qdisc replace dev {device} root tbf rate {rate} burst {burst_bytes} latency 50ms"
        run_program([*tc, *arguments.split()])


def _ip(*commands: str, inside: int | None = None) -> None:
    """Run `ip` commands in one call, inside the network namespace of process `inside` if it is given."""
    enter = [] if inside is None else ["nsenter", f"--target={inside}", "--net"]
    if commands:
        run_program([*enter, "ip", "-batch", "-"], stdin="\n".join(commands) + "\n")

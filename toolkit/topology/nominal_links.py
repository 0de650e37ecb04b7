"""What a link of a kind carries by its makers' figures, where nobody has measured it yet."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.topology.facts import Hardware
from toolkit.topology.node_links import nearest_nics_of
from toolkit.topology.tiers import Link

# Bytes per second and direction of one NVLink, by words of the GPU's name.
_NVLINKS = (
    (("P100",), 20e9, "NVIDIA: NVLink 1"),
    (("V100",), 25e9, "NVIDIA: NVLink 2"),
    (("A100", "A800", "A30", "A40", "RTX A"), 25e9, "NVIDIA: NVLink 3"),
    (("GB200", "GB300", "B200", "B300", "B100"), 50e9, "NVIDIA: NVLink 5"),
    (("H100", "H200", "H800", "H20", "GH200"), 25e9, "NVIDIA: NVLink 4"),
)
_ANY_NVLINK = (25e9, "NVIDIA: NVLink 2 to 4, the GPU's name being unknown")
_MOST_NVLINKS = 18  # of one GPU, up to NVLink 5
_PCIE = "PCIe 4.0 x16, 31.5 GB/s by PCI-SIG, less what"
_PCIE_LINKS = {
    "PIX": Link(6e-6, 25e9, f"{_PCIE} a switch costs"),
    "PXB": Link(6e-6, 25e9, f"{_PCIE} a switch costs"),
    "PHB": Link(8e-6, 12e9, f"{_PCIE} a host bridge costs"),
    "NODE": Link(8e-6, 12e9, f"{_PCIE} host bridges cost"),
    "SYS": Link(10e-6, 8e9, f"{_PCIE} the way between sockets costs"),
}
ASSUMED_GBIT_PER_S = 100.0
FABRIC_LATENCY_S = 10e-6


def nvlink(hardware: Hardware, links: Iterable[str | None], members: int) -> Link:
    """The link in a clique. Behind NVSwitches a GPU has all its links to each other one, else some to each."""
    counts = [int(link[2:]) for link in links if link and link.startswith("NV") and link[2:].isdigit()]
    least = min(counts, default=1)
    direct = least * (members - 1) <= _MOST_NVLINKS
    each, source = nvlink_rate(hardware)
    count = least * (members - 1) if direct else least
    return Link(3e-6, count * each, f"{source}, {each / 1e9:g} GB/s a link and direction; {count} of them")


def nvlink_rate(hardware: Hardware) -> tuple[float, str]:
    """(bytes per second and direction of one NVLink, source)."""
    name = next((gpu.name.value for gpu in hardware.gpus if gpu.name.value), "")
    for words, each, source in _NVLINKS:
        if any(word in name for word in words):
            return each, source
    return _ANY_NVLINK


def pcie(links: Iterable[str | None]) -> Link:
    """The slowest of these links; an unknown one is taken for the slowest there is."""
    found = [_PCIE_LINKS.get(link or "SYS", _PCIE_LINKS["SYS"]) for link in links if not (link or "").startswith("NV")]
    return min(found, key=lambda link: link.bytes_per_s, default=_PCIE_LINKS["SYS"])


def fabric(hardware: Hardware, ranks: int) -> tuple[Link, bool]:
    """(what the NICs give to each rank of a node, whether that is known).

    Where GPUs have NICs of their own, those that are no GPU's nearest are for storage and the like.
    """
    nearest = {
        nic for found in nearest_nics_of(hardware).values() if found.level in ("PIX", "PXB") for nic in found.nics
    }
    rates = [
        port.rate_gbit_per_s.value
        for nic in hardware.nics.value or ()
        if not nearest or nic.name in nearest
        for port in nic.ports
        if port.rate_gbit_per_s.value is not None
    ]
    total = sum(rates) or ASSUMED_GBIT_PER_S
    source = f"{len(rates)} active ports, {total:g} Gbit/s" if rates else f"assumed {total:g} Gbit/s a node"
    return Link(FABRIC_LATENCY_S, total * 1e9 / 8 / max(1, ranks), f"{source} for {ranks} ranks"), bool(rates)

"""Return the nominal latency and bandwidth of links, from vendor figures."""

from collections.abc import Iterable
from typing import NamedTuple

from toolkit.topology.facts import Hardware
from toolkit.topology.links.nodes import nvlink_count, nvlinks_to
from toolkit.topology.tiers import Link


class _Figures(NamedTuple):
    """Figures for GPUs whose names contain one of `words`; the NVLink rate is per link and direction."""

    words: tuple[str, ...]
    nvlink: str
    nvlink_bytes_per_s: float
    pcie_generation: int


_GPUS = (
    _Figures(("P100",), "NVLink 1", 20e9, 3),
    _Figures(("V100",), "NVLink 2", 25e9, 3),
    _Figures(("A100", "A800", "A30", "A40", "RTX A"), "NVLink 3", 25e9, 4),
    _Figures(("GB200", "GB300", "B200", "B300", "B100"), "NVLink 5", 50e9, 5),
    _Figures(("H100", "H200", "H800", "H20", "GH200"), "NVLink 4", 25e9, 5),
)
_ANY_GPU = _Figures((), "NVLink 2 to 4, with an unknown GPU name", 25e9, 4)
_WITHOUT_PCIE = ("GH200", "GB200", "GB300")  # NVLink-C2C connects these GPUs to the Grace CPU and its NICs


class _PciePath(NamedTuple):
    """The latency and effective rate of a path over PCIe 4.0 x16; the rate is scaled for other generations."""

    latency_s: float
    bytes_per_s: float
    less: str


_SWITCH = _PciePath(6e-6, 25e9, "the cost of a switch")
_HOST_BRIDGES = _PciePath(8e-6, 12e9, "the cost of host bridges")
_SOCKETS = _PciePath(10e-6, 8e9, "the cost of the path between sockets")
_PATHS = {"PIX": _SWITCH, "PXB": _SWITCH, "PHB": _HOST_BRIDGES, "NODE": _HOST_BRIDGES, "SYS": _SOCKETS}


def nvlink_of_group(hardware: Hardware, links: Iterable[str | None], members: int) -> Link:
    """Return the NVLink bandwidth of a GPU in a group with these links; the pair with the fewest links determines it."""
    least = min((count for link in links if (count := nvlink_count(link))), default=1)
    return nvlinks(hardware, nvlinks_to([least] * (members - 1)))


def nvlinks(hardware: Hardware, count: int) -> Link:
    """Return the combined bandwidth of `count` NVLinks of one GPU."""
    figures = _figures(hardware)
    sources = dict.fromkeys(link.link.source for link in hardware.links if nvlink_count(link.link.value))
    by = f" according to {', '.join(sources)}" if sources else ""
    return Link(
        3e-6,
        count * figures.nvlink_bytes_per_s,
        f"{count} link{'' if count == 1 else 's'}{by}; {figures.nvlink}: "
        f"{figures.nvlink_bytes_per_s / 1e9:g} GB/s per link and direction according to NVIDIA",
    )


def nvlink_bytes_per_s(hardware: Hardware) -> float:
    """Return the rate of one NVLink in one direction."""
    return _figures(hardware).nvlink_bytes_per_s


def pcie(hardware: Hardware, links: Iterable[str | None]) -> Link:
    """Return the slowest of these links over PCIe; an unknown link counts as the slowest kind."""
    paths = [_PATHS.get(link or "SYS", _SOCKETS) for link in links if not nvlink_count(link)]
    return _over_pcie(hardware, min(paths, key=lambda path: path.bytes_per_s, default=_SOCKETS))


def gpu_slot(hardware: Hardware) -> Link | None:
    """Return the PCIe path between a GPU and its NICs; None if PCIe does not connect them."""
    if not hardware.gpus or any(word in _gpu_name(hardware) for word in _WITHOUT_PCIE):
        return None
    return _over_pcie(hardware, _SWITCH)


def _over_pcie(hardware: Hardware, path: _PciePath) -> Link:
    generation = _figures(hardware).pcie_generation
    to_fourth = 2.0 ** (generation - 4)  # each generation doubles the rate
    source = f"PCIe {generation}.0 x16: {31.5 * to_fourth:g} GB/s according to PCI-SIG, minus {path.less}"
    return Link(path.latency_s, path.bytes_per_s * to_fourth, source)


def _figures(hardware: Hardware) -> _Figures:
    name = _gpu_name(hardware)
    return next((one for one in _GPUS if any(word in name for word in one.words)), _ANY_GPU)


def _gpu_name(hardware: Hardware) -> str:
    return next((gpu.name.value for gpu in hardware.gpus if gpu.name.value), "")

"""What a link of a kind carries by its makers' figures, where nobody has measured it yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from toolkit.topology.facts import Hardware
from toolkit.topology.node_links import nvlink_count, nvlinks_to
from toolkit.topology.tiers import Link


class _Figures(NamedTuple):
    """Of the GPUs with one of these words in their names; bytes per second and direction of one NVLink."""

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
_ANY_GPU = _Figures((), "NVLink 2 to 4, the GPU's name being unknown", 25e9, 4)
_WITHOUT_PCIE = ("GH200", "GB200", "GB300")  # their GPUs reach Grace, and the NICs behind it, by NVLink-C2C


class _Way(NamedTuple):
    """What a way over PCIe 4.0 x16 has left; other generations have it in proportion."""

    latency_s: float
    bytes_per_s: float
    less: str


_SWITCH = _Way(6e-6, 25e9, "what a switch costs")
_HOST_BRIDGES = _Way(8e-6, 12e9, "what host bridges cost")
_SOCKETS = _Way(10e-6, 8e9, "what the way between sockets costs")
_WAYS = {"PIX": _SWITCH, "PXB": _SWITCH, "PHB": _HOST_BRIDGES, "NODE": _HOST_BRIDGES, "SYS": _SOCKETS}


def nvlink_of_group(hardware: Hardware, links: Iterable[str | None], members: int) -> Link:
    """NVLink for a GPU in a group that has these links; all go by the pair that has the fewest."""
    least = min((count for link in links if (count := nvlink_count(link))), default=1)
    return nvlinks(hardware, nvlinks_to([least] * (members - 1)))


def nvlinks(hardware: Hardware, count: int) -> Link:
    """So many NVLinks of one GPU."""
    figures = _figures(hardware)
    told = dict.fromkeys(link.link.source for link in hardware.links if nvlink_count(link.link.value))
    said_by = f" by {', '.join(told)}" if told else ""
    return Link(
        3e-6,
        count * figures.nvlink_bytes_per_s,
        f"{count} link{'' if count == 1 else 's'}{said_by}; {figures.nvlink}: "
        f"{figures.nvlink_bytes_per_s / 1e9:g} GB/s a link and direction by NVIDIA",
    )


def nvlink_bytes_per_s(hardware: Hardware) -> float:
    """Of one NVLink and direction."""
    return _figures(hardware).nvlink_bytes_per_s


def pcie(hardware: Hardware, links: Iterable[str | None]) -> Link:
    """The slowest of these links over PCIe; an unknown one is taken for the slowest there is."""
    ways = [_WAYS.get(link or "SYS", _SOCKETS) for link in links if not nvlink_count(link)]
    return _over_pcie(hardware, min(ways, key=lambda way: way.bytes_per_s, default=_SOCKETS))


def gpu_slot(hardware: Hardware) -> Link | None:
    """What a GPU can tell its NICs, whatever they carry; None where the two are not joined by PCIe."""
    if not hardware.gpus or any(word in _gpu_name(hardware) for word in _WITHOUT_PCIE):
        return None
    return _over_pcie(hardware, _SWITCH)


def _over_pcie(hardware: Hardware, way: _Way) -> Link:
    generation = _figures(hardware).pcie_generation
    to_fourth = 2.0 ** (generation - 4)  # each generation carries twice what the one before does
    said = f"PCIe {generation}.0 x16: {31.5 * to_fourth:g} GB/s by PCI-SIG, less {way.less}"
    return Link(way.latency_s, way.bytes_per_s * to_fourth, said)


def _figures(hardware: Hardware) -> _Figures:
    name = _gpu_name(hardware)
    return next((one for one in _GPUS if any(word in name for word in one.words)), _ANY_GPU)


def _gpu_name(hardware: Hardware) -> str:
    return next((gpu.name.value for gpu in hardware.gpus if gpu.name.value), "")

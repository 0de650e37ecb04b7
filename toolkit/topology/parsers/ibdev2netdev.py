"""Read `ibdev2netdev`, also with -v: which network interface belongs to which port of an RDMA device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from toolkit.topology.parsers.device_names import after_a_gap, is_odd_device, odd_ones, out_of_order
from toolkit.topology.parsers.fabric_lines import Line, read_lines, strange

KEYS = {
    "rows": "how many lines name a device and an interface",
    "up": "the devices whose interface is Up",
    "map": "each line: ibdev, port, netdev, state, as printed; null for what is damaged, and for an interface that is not "
    "printed",
}
# With -v, the device stands behind its PCI address and before its part number, its firmware and the port's state.
ROW = re.compile(
    r"(?P<pci>[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7] )?(?P<device>[A-Za-z0-9][^\s:=()]*) "
    r"(?P<about>\([^()]*\) .* )?port (?P<port>[0-9]{1,4}) (?:\([A-Z]+ ?\) )?"
    r"(?:==>|<===>) (?:(?P<interface>[^\s()=]+) )?\((?P<state>Up|Down)\)"
)
ARROW = re.compile(r"==>")
RULER = re.compile(r"[-=_*#]{3,}")
EVIDENCE = re.compile(rf"(?:^|(?<=\s)){ROW.pattern}$|\S+ port [0-9]+ .*==>")


@dataclass(frozen=True)
class Interface:
    """One line: a port of a device and its network interface; None for what is not printed or damaged."""

    device: str | None
    port: int | None
    interface: str | None
    up: bool | None
    pci_address: str | None


def parse_ibdev2netdev(text: str) -> tuple[tuple[Interface, ...], tuple[str, ...]]:
    """Read the whole output: (one entry for each line, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of ibdev2netdev.
    """
    warnings: list[str] = []
    interfaces: list[Interface] = []
    rows: list[Line] = []
    for line in read_lines(text, EVIDENCE, "ibdev2netdev", warnings):
        if not ARROW.search(line.text):
            if not RULER.fullmatch(line.text):
                warnings.append(strange(line, "the table"))
            continue
        match = ROW.fullmatch(" ".join(line.text.split()))
        if match is None or _are_swapped(match):
            warnings.append(f"line {line.number}: no device with its interface can be read from {line.text[:60]!r}")
            interfaces.append(Interface(None, None, None, None, None))
        else:
            interfaces.append(_interface(match))
        rows.append(line)
    _check(interfaces, rows, warnings)
    return tuple(interfaces), tuple(warnings)


def answer_ibdev2netdev(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output of ibdev2netdev: (values of `KEYS`, warnings).

    Raises:
        CheckFailedError: it is no output of ibdev2netdev.
    """
    interfaces, warnings = parse_ibdev2netdev(text)
    facts = {
        "rows": len(interfaces),
        "up": [entry.device for entry in interfaces if entry.up],
        "map": [
            {
                "ibdev": entry.device,
                "port": None if entry.port is None else str(entry.port),
                "netdev": entry.interface,
                "state": None if entry.up is None else ("Up" if entry.up else "Down"),
            }
            for entry in interfaces
        ],
    }
    return facts, warnings


def _are_swapped(match: re.Match[str]) -> bool:
    return match["device"].startswith(("en", "eth", "bond")) or (match["interface"] or "").startswith(("mlx", "hfi1_"))


def _interface(match: re.Match[str]) -> Interface:
    pci = match["pci"]
    return Interface(
        device=match["device"],
        port=int(match["port"]),
        interface=match["interface"],
        up=match["state"] == "Up",
        pci_address=pci and pci.strip(),
    )


def _check(interfaces: list[Interface], rows: list[Line], warnings: list[str]) -> None:
    """What one line says against another, and names that are no driver's."""
    seen: set[Interface] = set()
    whole = [(entry.device, entry, line) for entry, line in zip(interfaces, rows, strict=True) if entry.device]
    for _, entry, line in whole:
        if entry in seen:
            warnings.append(f"line {line.number}: {entry.device} port {entry.port} is printed a second time")
        seen.add(entry)
        if entry.interface is None:
            warnings.append(f"line {line.number}: {entry.device} port {entry.port} has no interface")
    devices = [(device, line) for device, _, line in whole]
    named = [(entry.interface, line) for _, entry, line in whole if entry.interface]
    for names in (devices, named):
        odd = {place for place, (name, _) in enumerate(names) if is_odd_device(name)}
        for place in sorted(odd | set(odd_ones([name for name, _ in names]))):
            name, line = names[place]
            warnings.append(f"line {line.number}: {name!r} is no usual name of a device")
    order = [name for name, _ in devices]
    swapped = out_of_order(order)
    for place in after_a_gap(order) if swapped is None else [swapped]:
        warnings.append(f"line {devices[place][1].number}: {order[place]} does not follow {order[place - 1]}")

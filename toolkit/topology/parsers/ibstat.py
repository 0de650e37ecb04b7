"""Read `ibstat`: host channel adapters, their ports, state, rate and link layer.

Nesting is taken from the keys, not from the indentation, which mails and logs lose. What the command prints is in
infiniband-diags/ibstat.c of rdma-core.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from toolkit.topology.parsers.device_names import out_of_order
from toolkit.topology.parsers.fabric_lines import read_lines, strange
from toolkit.topology.parsers.key_sections import Devices, Keys, Section, one_of

KEYS = {
    "ca_count": "how many adapters are printed",
    "ca_names_in_order": "their names, in the printed order",
    "port_count": "how many ports are printed",
    "active_ports": "how many of them are usable: Active and LinkUp",
    "active_infiniband": "the usable ones of InfiniBand, as adapter:port",
    "active_ethernet": "the usable ones of Ethernet, as adapter:port",
    "not_active": "the others, as adapter:port with state/physical state",
    "cas": "each adapter: name, ca_type, nports (how many ports it says it has), fw, and its ports: port, state, phys, "
    "rate (Gbit/s; of a port that is down it is no measurement), base_lid, sm_lid, link_layer; without what is not "
    "printed",
}
ADAPTER_LINE = re.compile(r"(?:CA|Switch|Router|iWARP RNIC|\?\?\?):? '([^'\s]+)'")
PORT_LINE = re.compile(r"Port ([0-9]{1,4}):")
KEY_LINE = re.compile(r"([A-Z][A-Za-z ]*?):(\s.*|)")
GUID = re.compile(r"0x[0-9a-fA-F]{16}")
LID = re.compile(r"[0-9]{1,10}")
ADAPTER_KEYS = Keys(
    {
        "CA type": re.compile(r"[^:']*"),
        "Number of ports": re.compile(r"[0-9]{1,4}"),
        "Firmware version": re.compile(r"[\w.+-]*"),
        "Hardware version": re.compile(r"\w*"),
        "Node GUID": GUID,
        "System image GUID": GUID,
    }
)
# Bit rate of a lane (SDR to XDR) times the number of lanes; FDR10 is told by its name.
RATES = sorted({lane * width for lane in (2.5, 5, 10, 14, 25, 50, 100, 200) for width in (1, 2, 4, 8, 12)})
PORT_KEYS = Keys(
    {
        "State": one_of("Down", "Initializing", "Armed", "Active", "???"),
        "Physical state": one_of(
            "No state change", "Sleep", "Polling", "Disabled", "PortConfigurationTraining", "LinkUp",
            "LinkErrorRecovery", "PhyTest", "???",
        ),
        "Rate": re.compile("(" + "|".join(re.escape(f"{rate:g}") for rate in RATES) + r")( \(FDR10\))?"),
        "Base lid": LID,
        "LMC": re.compile("[0-7]"),
        "SM lid": LID,
        "Capability mask": re.compile("0x[0-9a-fA-F]{8}"),
        "Port GUID": GUID,
        "Link layer": one_of("InfiniBand", "Ethernet", "Unspecified", "Unknown", "IB"),
    },
    whole=frozenset({"State", "Physical state", "Link layer"}),
)  # fmt: skip
EVIDENCE = re.compile(rf"(?:^|(?<=\s)){ADAPTER_LINE.pattern}$|(?:^|(?<=\s))CA type:|Port [0-9]+:$|Physical state:")
# What mlx5's adapters say; those of other drivers say what they like, or nothing.
FORMS_OF_MLX5 = {
    "CA type": re.compile(r"MT[0-9]{4,5}"),
    "Firmware version": re.compile(r"[0-9]{2}\.[0-9]{2}\.[0-9]{4}"),
}
_ADAPTER_NAMES = {"ca_type": "CA type", "nports": "Number of ports", "fw": "Firmware version"}
_PORT_NAMES = {
    "state": "State", "phys": "Physical state", "rate": "Rate", "base_lid": "Base lid", "sm_lid": "SM lid",
    "link_layer": "Link layer",
}  # fmt: skip


@dataclass(frozen=True)
class Port:
    """One port. `rate_gb_per_s` is in Gbit/s; on a port that is down it is the default, not a measurement."""

    number: int
    state: str | None
    physical_state: str | None
    rate_gb_per_s: float | None
    base_lid: int | None
    subnet_manager_lid: int | None
    link_layer: str | None

    @property
    def active(self) -> bool:
        """Usable: LinkUp alone is not enough, a subnet manager must have activated the port."""
        return self.state == "Active" and self.physical_state == "LinkUp"


@dataclass(frozen=True)
class Adapter:
    """One host channel adapter; `port_count` is what it claims, `ports` what was printed."""

    name: str
    type: str | None
    firmware: str | None
    port_count: int | None
    ports: tuple[Port, ...]


def parse_ibstat(text: str) -> tuple[tuple[Adapter, ...], tuple[str, ...]]:
    """Read the whole output: (adapters in printed order, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of ibstat.
    """
    sections, warnings = _read(text)
    return tuple(_adapter(section) for section in sections), warnings


def answer_ibstat(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output of ibstat: (values of `KEYS`, warnings).

    Raises:
        CheckFailedError: it is no output of ibstat.
    """
    sections, warnings = _read(text)
    adapters = [_adapter(section) for section in sections]
    ports = [(f"{adapter.name}:{port.number}", port) for adapter in adapters for port in adapter.ports]
    active = [(name, port.link_layer) for name, port in ports if port.active]
    idle = [(name, port) for name, port in ports if not port.active and port.state and port.physical_state]
    facts = {
        "ca_count": len(adapters),
        "ca_names_in_order": [adapter.name for adapter in adapters],
        "port_count": len(ports),
        "active_ports": len(active),
        "active_infiniband": [name for name, layer in active if layer in ("InfiniBand", "IB")],
        "active_ethernet": [name for name, layer in active if layer == "Ethernet"],
        "not_active": [f"{name} {port.state}/{port.physical_state}" for name, port in idle],
        "cas": [_entry(section) for section in sections],
    }
    return facts, warnings


def _read(text: str) -> tuple[list[Section], tuple[str, ...]]:
    warnings: list[str] = []
    devices = Devices(ADAPTER_KEYS, PORT_KEYS, warnings)
    for line in read_lines(text, EVIDENCE, "ibstat", warnings):
        if match := ADAPTER_LINE.fullmatch(line.text):
            devices.begin_device(match[1], line)
        elif match := PORT_LINE.fullmatch(line.text):
            devices.begin_port(match[1], line)
        elif (match := KEY_LINE.fullmatch(line.text)) and devices.knows(match[1]):
            devices.put(match[1], match[2].strip(), line)
        else:
            warnings.append(strange(line, "an adapter"))
    devices.check("Number of ports")
    _check(devices.sections, warnings)
    return devices.sections, tuple(warnings)


def _check(sections: list[Section], warnings: list[str]) -> None:
    """What one line says against another."""
    place = out_of_order([section.name for section in sections])
    if place is not None:
        section = sections[place]
        warnings.append(f"line {section.line}: {section.name} does not follow {sections[place - 1].name}")
    for section in sections:
        for key, form in FORMS_OF_MLX5.items() if section.name.startswith("mlx5_") else ():
            value = section.get(key)
            if value is not None and not form.fullmatch(value):
                warnings.append(f"line {section.line}: {key} of {section.name} is not read from {value[:60]!r}")
                section.values[key] = None
        for port in section.parts:
            warnings.extend(f"line {port.line}: {section.name} port {port.name}: {said}" for said in _against(port))


def _against(port: Section) -> list[str]:
    """Facts of one port that do not go together, so that some line is not this port's."""
    state, physical, layer = port.get("State"), port.get("Physical state"), port.get("Link layer")
    said = []
    if state in ("Active", "Armed", "Initializing") and physical in ("Disabled", "Polling", "Sleep"):
        said.append(f"{state} does not go with {physical}")
    if layer == "Ethernet" and port.number("SM lid"):
        said.append("there is no subnet manager on Ethernet")
    if layer == "InfiniBand" and state == "Active" and 0 in (port.number("SM lid"), port.number("Base lid")):
        said.append("an active port of InfiniBand has a lid and a subnet manager")
    return said


def _adapter(section: Section) -> Adapter:
    return Adapter(
        name=section.name,
        type=section.get("CA type"),
        firmware=section.get("Firmware version"),
        port_count=section.number("Number of ports"),
        ports=tuple(_port(port) for port in section.parts),
    )


def _port(section: Section) -> Port:
    rate = section.get("Rate")
    return Port(
        number=int(section.name),
        state=section.get("State"),
        physical_state=section.get("Physical state"),
        rate_gb_per_s=None if rate is None else float(rate.partition(" ")[0]),
        base_lid=section.number("Base lid"),
        subnet_manager_lid=section.number("SM lid"),
        link_layer=section.get("Link layer"),
    )


def _entry(section: Section) -> dict[str, Any]:
    """One of `cas`."""
    entry: dict[str, Any] = {"name": section.name, **section.chosen(_ADAPTER_NAMES)}
    if "nports" in entry:
        entry["nports"] = section.number("Number of ports")
    ports = []
    for part in section.parts:
        port: dict[str, Any] = {"port": int(part.name), **part.chosen(_PORT_NAMES)}
        for name in {"rate", "base_lid", "sm_lid"} & port.keys():
            text = port[name]
            port[name] = None if text is None else 2.5 if text == "2.5" else int(text.partition(" ")[0])
        ports.append(port)
    return {**entry, "ports": ports}

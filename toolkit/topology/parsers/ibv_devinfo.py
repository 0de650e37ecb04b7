"""Read `ibv_devinfo`, also with -v and -l: devices and their ports in the words of libibverbs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from toolkit.topology.parsers.fabric_lines import Line, read_lines, strange
from toolkit.topology.parsers.key_sections import Devices, Keys, Section, one_of

KEYS = {
    "device_count": "how many devices are printed",
    "active_ports": "the ports with the state PORT_ACTIVE (4), as device:port",
    "devices": "each device: hca_id, transport, fw_ver, vendor_id, vendor_part_id, board_id, phys_port_cnt, and its ports: "
    "port (a number), state, active_mtu, sm_lid, port_lid, link_layer, as printed; without what is not printed",
}
HEADER = re.compile(r"hca_id:\s*([^\s:]+)")
PORT_LINE = re.compile(r"port:\s*([0-9]{1,4})")
KEY_LINE = re.compile(r"([a-z][a-z0-9_]*):(\s.*|)")
FOUND = re.compile(r"([0-9]{1,5}) HCAs? found:")  # -l: their names follow
NONE_FOUND = re.compile("No IB devices found")
EVIDENCE = re.compile(
    rf"(?:^|(?<=\s)){HEADER.pattern}$|{FOUND.pattern}$|{NONE_FOUND.pattern}$|node_guid:|sys_image_guid:|max_mtu:"
)
GUID = re.compile("(?:[0-9a-f]{4}:){3}[0-9a-f]{4}")
NUMBER = re.compile("[0-9]{1,10}")
MTU = one_of("256 (1)", "512 (2)", "1024 (3)", "2048 (4)", "4096 (5)", "invalid MTU (0)")
DEVICE_KEYS = Keys(
    {
        "transport": re.compile(
            r"InfiniBand \(0\)|iWARP \(1\)|usNIC \(2\)|usNIC UDP \(3\)|unspecified \(4\)|invalid transport \(-?[0-9]+\)"
        ),
        "fw_ver": re.compile(r"[\w.+-]+"),
        "node_guid": GUID,
        "sys_image_guid": GUID,
        "vendor_id": re.compile("0x[0-9a-f]{4,8}"),
        "vendor_part_id": NUMBER,
        "hw_ver": re.compile("0x[0-9a-fA-F]{1,8}"),
        "board_id": re.compile(r"MT_[0-9]{10}|(?!MT_)[^\s:]+(?: [^\s:]+)*"),
        "phys_port_cnt": re.compile("[0-9]{1,4}"),
    },
    whole=frozenset({"transport"}),
)
PORT_KEYS = Keys(
    {
        "state": one_of(
            "PORT_NOP (0)", "PORT_DOWN (1)", "PORT_INIT (2)", "PORT_ARMED (3)", "PORT_ACTIVE (4)",
            "PORT_ACTIVE_DEFER (5)",
        ),
        "max_mtu": MTU,
        "active_mtu": MTU,
        "sm_lid": NUMBER,
        "port_lid": NUMBER,
        "port_lmc": re.compile("0x[0-9a-f]{2}"),
        "link_layer": one_of("InfiniBand", "Ethernet", "Unspecified", "Unknown"),
    },
    whole=frozenset({"state", "max_mtu", "active_mtu", "link_layer"}),
)  # fmt: skip
FIRMWARE_OF_MLX5 = re.compile(r"[0-9]{2}\.[0-9]{2}\.[0-9]{4}")
_DEVICE_NAMES = ("transport", "fw_ver", "vendor_id", "vendor_part_id", "board_id", "phys_port_cnt")
_PORT_NAMES = ("state", "active_mtu", "sm_lid", "port_lid", "link_layer")


@dataclass(frozen=True)
class VerbsPort:
    """One port; `active_mtu_bytes` is what a path may use, `max_mtu_bytes` what the port can."""

    number: int
    state: str | None
    max_mtu_bytes: int | None
    active_mtu_bytes: int | None
    lid: int | None
    subnet_manager_lid: int | None
    link_layer: str | None


@dataclass(frozen=True)
class VerbsDevice:
    """One device; `port_count` is what it claims, `ports` what was printed. `vendor_id` is an OUI of the IEEE."""

    name: str
    transport: str | None
    firmware: str | None
    vendor_id: int | None
    vendor_part_id: int | None
    board_id: str | None
    port_count: int | None
    ports: tuple[VerbsPort, ...]


def parse_ibv_devinfo(text: str) -> tuple[tuple[VerbsDevice, ...], tuple[str, ...]]:
    """Read the whole output: (devices in printed order, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of ibv_devinfo.
    """
    sections, warnings = _read(text)
    return tuple(_device(section) for section in sections), warnings


def answer_ibv_devinfo(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output of ibv_devinfo: (values of `KEYS`, warnings).

    Raises:
        CheckFailedError: it is no output of ibv_devinfo.
    """
    sections, warnings = _read(text)
    facts = {
        "device_count": len(sections),
        "active_ports": [
            f"{section.name}:{port.name}"
            for section in sections
            for port in section.parts
            if port.get("state") == "PORT_ACTIVE (4)"
        ],
        "devices": [
            {
                "hca_id": section.name,
                **section.chosen({name: name for name in _DEVICE_NAMES}),
                "ports": [
                    {"port": int(port.name), **port.chosen({name: name for name in _PORT_NAMES})}
                    for port in section.parts
                ],
            }
            for section in sections
        ],
    }
    return facts, warnings


def _read(text: str) -> tuple[list[Section], tuple[str, ...]]:
    warnings: list[str] = []
    lines = [
        line for line in read_lines(text, EVIDENCE, "ibv_devinfo", warnings) if not NONE_FOUND.fullmatch(line.text)
    ]
    if lines and (match := FOUND.fullmatch(lines[0].text)):
        return _names_alone(lines[0], int(match[1]), lines[1:], warnings), tuple(warnings)
    devices = Devices(DEVICE_KEYS, PORT_KEYS, warnings)
    verbose = any(line.text.startswith(("max_mr_size:", "device_cap_flags:", "max_msg_sz:")) for line in lines)
    for line in lines:
        if match := HEADER.fullmatch(line.text):
            devices.begin_device(match[1], line)
        elif match := PORT_LINE.fullmatch(line.text):
            devices.begin_port(match[1], line)
        elif (match := KEY_LINE.fullmatch(line.text)) and devices.knows(match[1]):
            devices.put(match[1], match[2].strip(), line)
        elif not verbose:  # -v prints many more keys, with flags below some, and more with each version
            warnings.append(strange(line, "a device"))
    devices.check("phys_port_cnt")
    _check(devices.sections, warnings)
    return devices.sections, tuple(warnings)


def _names_alone(header: Line, count: int, lines: list[Line], warnings: list[str]) -> list[Section]:
    """What -l prints."""
    sections: list[Section] = []
    for line in lines:
        if " " in line.text or line.text in [section.name for section in sections]:
            warnings.append(strange(line, "the list of devices"))
        else:
            sections.append(Section(line.text, line.number))
    if count != len(sections):
        warnings.append(f"line {header.number}: {count} devices are said but {len(sections)} are named")
    return sections


def _check(sections: list[Section], warnings: list[str]) -> None:
    """What one line says against another."""
    for section in sections:
        firmware = section.get("fw_ver")
        if section.name.startswith("mlx5_") and firmware and not FIRMWARE_OF_MLX5.fullmatch(firmware):
            warnings.append(f"line {section.line}: fw_ver of {section.name} is not read from {firmware[:60]!r}")
            section.values["fw_ver"] = None
        for port in section.parts:
            most, used = _bytes(port.get("max_mtu")), _bytes(port.get("active_mtu"))
            if most is not None and used is not None and used > most:
                warnings.append(f"line {port.line}: {section.name}: an MTU of {used} where {most} is the most")
            joined = port.get("link_layer") == "InfiniBand" and port.get("state") == "PORT_ACTIVE (4)"
            if joined and 0 in (port.number("sm_lid"), port.number("port_lid")):
                warnings.append(f"line {port.line}: {section.name}: an active port of InfiniBand has lids")
            if port.get("link_layer") == "Ethernet" and port.number("sm_lid"):
                warnings.append(f"line {port.line}: {section.name}: there is no subnet manager on Ethernet")


def _bytes(mtu: str | None) -> int | None:
    return None if mtu is None or mtu.startswith("invalid") else int(mtu.partition(" ")[0])


def _device(section: Section) -> VerbsDevice:
    return VerbsDevice(
        name=section.name,
        transport=section.get("transport"),
        firmware=section.get("fw_ver"),
        vendor_id=section.number("vendor_id"),
        vendor_part_id=section.number("vendor_part_id"),
        board_id=section.get("board_id"),
        port_count=section.number("phys_port_cnt"),
        ports=tuple(
            VerbsPort(
                number=int(port.name),
                state=port.get("state"),
                max_mtu_bytes=_bytes(port.get("max_mtu")),
                active_mtu_bytes=_bytes(port.get("active_mtu")),
                lid=port.number("port_lid"),
                subnet_manager_lid=port.number("sm_lid"),
                link_layer=port.get("link_layer"),
            )
            for port in section.parts
        ),
    )

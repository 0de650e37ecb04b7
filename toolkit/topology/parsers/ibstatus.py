"""Read `ibstatus`: the state and rate of every port, as the kernel words them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from toolkit.topology.parsers.device_names import out_of_order
from toolkit.topology.parsers.fabric_lines import read_lines, strange
from toolkit.topology.parsers.key_sections import Keys, Section, begin_port, one_of

KEYS = {
    "port_count": "how many ports are printed",
    "active": "how many of them have the state 4: ACTIVE",
    "ports": "each of them: device, port, default_gid, base_lid, sm_lid, state, phys_state, rate, link_layer, as printed "
    "(lids with 0x); without what is not printed",
}
HEADER = re.compile(r"Infiniband device '([^'\s]+)' port ([0-9]{1,4}) status:")
KEY_LINE = re.compile(r"([a-z][a-z_ ]*?):\s*(.*)")
EVIDENCE = re.compile(
    rf"(?:^|(?<=\s)){HEADER.pattern}|default gid:|phys state:|Fatal error: +device '[^']*': sys files not found"
)
LID = re.compile("0x[0-9a-f]{1,8}|unknown")
# Gbit/s of one lane; a lane of the first generation has no name in old kernels.
LANES = {
    "": 2.5, "SDR": 2.5, "DDR": 5.0, "QDR": 10.0, "FDR10": 10.0, "FDR": 14.0, "EDR": 25.0, "HDR": 50.0, "NDR": 100.0,
    "XDR": 200.0,
}  # fmt: skip
RATE = re.compile(r"([0-9]+(?:\.5)?) Gb/sec \(([0-9]{1,2})X ?([A-Z0-9]*)\)")
PORT_KEYS = Keys(
    {
        "default gid": re.compile("(?:[0-9a-f]{4}:){7}[0-9a-f]{4}|unknown"),
        "base lid": LID,
        "sm lid": LID,
        "state": one_of("0: NOP", "1: DOWN", "2: INIT", "3: ARMED", "4: ACTIVE", "5: ACTIVE_DEFER", "unknown"),
        "phys state": one_of(
            "0: <unknown>", "1: Sleep", "2: Polling", "3: Disabled", "4: PortConfigurationTraining", "5: LinkUp",
            "6: LinkErrorRecovery", "7: Phy Test", "unknown",
        ),
        "rate": re.compile(f"{RATE.pattern}|unknown"),
        "link_layer": one_of("InfiniBand", "Ethernet", "Unspecified", "Unknown", "unknown"),
    },
    whole=frozenset({"state", "phys state", "rate", "link_layer"}),
)  # fmt: skip
_NAMES = {
    "default_gid": "default gid", "base_lid": "base lid", "sm_lid": "sm lid", "state": "state",
    "phys_state": "phys state", "rate": "rate", "link_layer": "link_layer",
}  # fmt: skip


@dataclass(frozen=True)
class PortStatus:
    """One port, in the kernel's words; None where a line is missing or damaged, or says "unknown"."""

    device: str
    port: int
    default_gid: str | None
    base_lid: int | None
    subnet_manager_lid: int | None
    state: str | None
    physical_state: str | None
    rate_gbit_per_s: float | None
    link_layer: str | None


def parse_ibstatus(text: str) -> tuple[tuple[PortStatus, ...], tuple[str, ...]]:
    """Read the whole output: (ports in printed order, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of ibstatus.
    """
    sections, warnings = _read(text)
    return tuple(_status(section) for section in sections), warnings


def answer_ibstatus(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output of ibstatus: (values of `KEYS`, warnings).

    Raises:
        CheckFailedError: it is no output of ibstatus.
    """
    sections, warnings = _read(text)
    facts = {
        "port_count": len(sections),
        "active": sum(section.get("state") == "4: ACTIVE" for section in sections),
        "ports": [
            {"device": device, "port": port, **section.chosen(_NAMES)}
            for section in sections
            for device, port in [_device_and_port(section)]
        ],
    }
    return facts, warnings


def _read(text: str) -> tuple[list[Section], tuple[str, ...]]:
    warnings: list[str] = []
    sections: list[Section] = []
    here: Section | None = None  # None also below a header that is lost
    for line in read_lines(text, EVIDENCE, "ibstatus", warnings):
        if match := HEADER.fullmatch(line.text):
            here = begin_port(match[1], match[2], here, sections, line, warnings)
        elif (match := KEY_LINE.fullmatch(line.text)) and match[1] in PORT_KEYS.forms:
            begins = ("default gid", "rate")
            here = PORT_KEYS.put_in_port(here, match[1], match[2], line, warnings, begins=begins)
        else:
            warnings.append(strange(line, "a port"))
    place = out_of_order([section.name for section in sections])
    if place is not None:
        section = sections[place]
        warnings.append(f"line {section.line}: {section.name} does not follow {sections[place - 1].name}")
    for section in sections:
        warnings.extend(f"line {section.line}: {section.name}: {said}" for said in _against(section))
    PORT_KEYS.warn_of_missing(sections, "port", warnings)
    return sections, tuple(warnings)


def _against(section: Section) -> list[str]:
    """Facts of one port that do not go together. A rate that is no lane's rate times the lanes is unknown."""
    said = []
    rate = RATE.fullmatch(section.get("rate") or "")
    if rate and float(rate[1]) != LANES.get(rate[3], 0.0) * int(rate[2]):
        said.append(f"{rate[0]} does not add up")
        section.values["rate"] = None
    state, physical, layer = section.get("state"), section.get("phys state"), section.get("link_layer")
    if state in ("2: INIT", "3: ARMED", "4: ACTIVE") and physical in ("1: Sleep", "2: Polling", "3: Disabled"):
        said.append(f"{state} does not go with {physical}")
    if layer == "Ethernet" and section.get("sm lid") not in ("0x0", "unknown", None):
        said.append("there is no subnet manager on Ethernet")
    if layer == "InfiniBand" and state == "4: ACTIVE" and "0x0" in (section.get("sm lid"), section.get("base lid")):
        said.append("an active port of InfiniBand has a lid and a subnet manager")
    return said


def _device_and_port(section: Section) -> tuple[str, int]:
    device, _, port = section.name.rpartition(":")
    return device, int(port)


def _status(section: Section) -> PortStatus:
    device, port = _device_and_port(section)
    said = {key: None if value == "unknown" else value for key, value in section.values.items()}
    lids = {key: None if (text := said.get(key)) is None else int(text, 16) for key in ("base lid", "sm lid")}
    rate = said.get("rate")
    return PortStatus(
        device=device,
        port=port,
        default_gid=said.get("default gid"),
        base_lid=lids["base lid"],
        subnet_manager_lid=lids["sm lid"],
        state=said.get("state"),
        physical_state=said.get("phys state"),
        rate_gbit_per_s=None if rate is None else float(rate.partition(" ")[0]),
        link_layer=said.get("link_layer"),
    )

"""Read `opainfo`: the state, lanes and lids of the ports of Omni-Path adapters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from toolkit.topology.parsers.fabric_lines import read_lines, strange
from toolkit.topology.parsers.key_sections import Keys, Section, begin_port

KEYS = {
    "ports": "how many ports are printed; the other keys are those of the first one",
    "device": "its adapter",
    "port": "its number",
    "state": "its state, as printed: Active when it is usable",
    "lane_speed": "the speed of a lane that is in use, as printed (25Gb)",
    "width": "how many lanes are in use",
    "rate_gbps": "speed of a lane times lanes, in Gbit/s; null when one of them is",
    "lid": "its lid, as a number",
    "sm_lid": "the lid of its subnet manager, as a number",
}
HEADER = re.compile(r"([A-Za-z][\w.-]*):([0-9]{1,4})\s+PortG(?:ID:0x[0-9a-f]{16}:|UID:(?:0x)?)[0-9a-f]{16}")
KEY_LINE = re.compile(
    r"(PortState|LinkSpeed|LinkWidthDnGrd|LinkWidth|LCRC|LID|Xmit Data|Recv Data|Link Quality)(?::\s*|\s+)(.*)"
)
CABLE = re.compile(r"QSFP\b.*")
EVIDENCE = re.compile(rf"(?:^|(?<=\s)){HEADER.pattern}|PortState:|LinkSpeed\s+Act:|LinkWidthDnGrd\s+ActTx:")
_STATES = r"(?:Active|Armed|Init|Down|Offline|Polling|Disabled|LinkUp|No ?Op)"
_COUNTER = re.compile(r"[0-9]+ MB Pkts:\s+[0-9]+")
_SPEED = re.compile(r"([0-9]{1,4}(?:\.[0-9])?)Gb")
_QUALITIES = ("Down", "Bad", "Poor", "Good", "Very ?Good", "Excellent")
PORT_KEYS = Keys(
    {
        "PortState": re.compile(rf"{_STATES}(?:\s+\(.*\))?"),
        "LinkSpeed": re.compile(r"Act: ([0-9.]+Gb|[A-Z]\w*)\s+En: (\S+)(?:\s+Sup: \S+)?"),
        "LinkWidth": re.compile(r"Act: ([1-4]|[A-Z]\w*)\s+En: (\S+)(?:\s+Sup: \S+)?"),
        "LinkWidthDnGrd": re.compile(r"ActTx: ([0-4]|[A-Z]\w*)\s+Rx: ([0-4]|[A-Z]\w*)\s+En: \S+(?:\s+Sup: \S+)?"),
        "LCRC": re.compile(r"Act: \S+\s+En: \S+(?:\s+Mgmt: (?:True|False))?(?:\s+Sup: \S+)?"),
        "LID": re.compile("0x([0-9a-f]{8})-0x([0-9a-f]{8})\\s+SM LID: 0x([0-9a-f]{8}) SL: [0-9]+"),
        "Xmit Data": _COUNTER,
        "Recv Data": _COUNTER,
        "Link Quality": re.compile("|".join(rf"{number} \({word}\)" for number, word in enumerate(_QUALITIES))),
    },
    # What is read of these does not stand at the end of the line.
    whole=frozenset({"PortState", "LinkSpeed", "LinkWidth", "LinkWidthDnGrd", "LID", "Link Quality"}),
)


@dataclass(frozen=True)
class OmniPathPort:
    """One port. `lane_speed` is as printed ("25Gb", "None" on a port that is down); None where a line is damaged."""

    device: str
    number: int
    state: str | None
    lane_speed: str | None
    lanes: int | None
    lid: int | None
    subnet_manager_lid: int | None
    link_quality: int | None

    @property
    def rate_gbit_per_s(self) -> float | None:
        """What the lanes in use carry together."""
        speed = _SPEED.fullmatch(self.lane_speed or "")
        return None if speed is None or self.lanes is None else float(speed[1]) * self.lanes


def parse_opainfo(text: str) -> tuple[tuple[OmniPathPort, ...], tuple[str, ...]]:
    """Read the whole output: (ports in printed order, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of opainfo.
    """
    warnings: list[str] = []
    sections: list[Section] = []
    here: Section | None = None  # None also below a header that is lost
    for line in read_lines(text, EVIDENCE, "opainfo", warnings):
        if match := HEADER.fullmatch(line.text):
            here = begin_port(match[1], match[2], here, sections, line, warnings)
        elif match := KEY_LINE.fullmatch(line.text):
            begins = ("PortState", "LID")
            here = PORT_KEYS.put_in_port(here, match[1], match[2], line, warnings, begins=begins)
        elif not CABLE.fullmatch(line.text):
            warnings.append(strange(line, "a port"))
    PORT_KEYS.warn_of_missing(sections, "port", warnings)
    ports = tuple(_port(section) for section in sections)
    for section, port in zip(sections, ports, strict=True):
        warnings.extend(f"line {section.line}: {section.name}: {said}" for said in _against(section, port))
    return ports, tuple(warnings)


def answer_opainfo(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output of opainfo: (values of `KEYS`, warnings).

    Raises:
        CheckFailedError: it is no output of opainfo.
    """
    ports, warnings = parse_opainfo(text)
    facts: dict[str, Any] = dict.fromkeys(KEYS)
    facts["ports"] = len(ports)
    if ports:
        first = ports[0]
        rate = first.rate_gbit_per_s
        facts |= {
            "device": first.device,
            "port": first.number,
            "state": first.state,
            "lane_speed": first.lane_speed,
            "width": first.lanes,
            "rate_gbps": int(rate) if rate is not None and rate.is_integer() else rate,
            "lid": first.lid,
            "sm_lid": first.subnet_manager_lid,
        }
    return facts, warnings


def _fields(section: Section, key: str) -> tuple[str, ...]:
    """The parts of a key's value, none where it is missing or damaged."""
    match = PORT_KEYS.forms[key].fullmatch(section.get(key) or "")
    return match.groups() if match else ()


def _port(section: Section) -> OmniPathPort:
    device, _, number = section.name.rpartition(":")
    speed, width, lids = (_fields(section, key) for key in ("LinkSpeed", "LinkWidth", "LID"))
    quality = section.get("Link Quality")
    return OmniPathPort(
        device=device,
        number=int(number),
        state=section.get("PortState"),
        lane_speed=speed[0] if speed else None,
        lanes=int(width[0]) if width and width[0].isdecimal() else None,
        lid=int(lids[0], 16) if lids else None,
        subnet_manager_lid=int(lids[2], 16) if lids else None,
        link_quality=int(quality[0]) if quality else None,
    )


def _against(section: Section, port: OmniPathPort) -> list[str]:
    """Facts of one port that do not go together."""
    said = []
    speed, width, lids = (_fields(section, key) for key in ("LinkSpeed", "LinkWidth", "LID"))
    for what, fields in (("a speed", speed), ("a width", width)):
        if port.state == "Active" and fields and fields[0] not in fields[1].split(","):
            said.append(f"{what} of {fields[0]} where {fields[1]} is enabled")
    downgraded = _fields(section, "LinkWidthDnGrd")
    if port.lanes is not None and any(text.isdecimal() and int(text) > port.lanes for text in downgraded[:2]):
        said.append(f"{downgraded[0]} and {downgraded[1]} lanes of {port.lanes}")
    if lids and int(lids[1], 16) < int(lids[0], 16):
        said.append(f"the lids 0x{lids[0]}-0x{lids[1]} run backwards")
    if port.state == "Active" and 0 in (port.lid, port.subnet_manager_lid):
        said.append("an active port has a lid and a subnet manager")
    return said

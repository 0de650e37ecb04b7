"""Read `ibstat`: host channel adapters, their ports, state, rate and link layer.

infiniband-diags/ibstat.c of rdma-core prints the keys of a section once each, in a fixed order. toolkit stops at the
first line that breaks this order, since it cannot know to which adapter later lines belong. It derives the nesting from
the keys and not from the indentation, which is lost in mails and logs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.topology.readers.lines import Line, first_damaged, read_lines, refusal

KEYS = {
    "ca_count": "number of adapters in the output",
    "ca_names_in_order": "names of the adapters, in the printed order",
    "port_count": "number of ports in the output",
    "active_ports": "number of usable ports, with state Active and physical state LinkUp",
    "active_infiniband": "usable InfiniBand ports, as adapter:port",
    "active_ethernet": "usable Ethernet ports, as adapter:port",
    "not_active": "other ports, as adapter:port with state/physical state",
    "cas": "each adapter before the first damaged line: name, ca_type, nports (the number of ports that it states), fw, and "
    "its ports: port, state, phys, rate (Gbit/s; a default value if the port is down), base_lid, sm_lid, link_layer; "
    "values that are not printed are omitted",
}
_COUNTS = tuple(key for key in KEYS if key != "cas")  # null if a line is damaged, since it may belong to an adapter
_ADAPTER_LINE = re.compile(r"(?:CA|Switch|Router|iWARP RNIC|\?\?\?):? '([\w.:-]+)'", re.ASCII)
_PORT_LINE = re.compile(r"Port ([0-9]{1,4}):")
_KEY_LINE = re.compile(r"([A-Z][A-Za-z ]*?):(?:\s+(.*))?")
_GUID = re.compile(r"0x[0-9a-fA-F]{16}")
_LID = re.compile(r"[0-9]{1,10}")
_TYPE = re.compile(r"[\w .,()/+-]*", re.ASCII)
_FIRMWARE = re.compile(r"[\w.+-]*", re.ASCII)
# Bit rate per lane (SDR to XDR) times the number of lanes; ibstat marks FDR10 by name.
_RATES = sorted({lane * width for lane in (2.5, 5, 10, 14, 25, 50, 100, 200) for width in (1, 2, 4, 8, 12)})
_STATES = "Down|Initializing|Armed|Active|\\?\\?\\?"
_PHYSICAL = (
    "No state change|Sleep|Polling|Disabled|PortConfigurationTraining|LinkUp|LinkErrorRecovery|PhyTest|\\?\\?\\?"
)
_ADAPTER_KEYS = {
    "CA type": _TYPE, "Number of ports": re.compile(r"[0-9]{1,4}"), "Firmware version": _FIRMWARE,
    "Hardware version": re.compile(r"\w*", re.ASCII), "Node GUID": _GUID, "System image GUID": _GUID,
}  # fmt: skip
# mlx5 adapters print these keys in one format; the formats of other drivers vary.
_MLX5_KEYS = {
    "CA type": re.compile(r"MT[0-9]{4,5}"), "Firmware version": re.compile(r"[0-9]{2}\.[0-9]{2}\.[0-9]{4}")
}  # fmt: skip
_PORT_KEYS = {
    "State": re.compile(_STATES), "Physical state": re.compile(_PHYSICAL),
    "Rate": re.compile("(" + "|".join(re.escape(f"{rate:g}") for rate in _RATES) + r")( \(FDR10\))?"),
    "Base lid": _LID, "LMC": re.compile("[0-7]"), "SM lid": _LID, "Capability mask": re.compile("0x[0-9a-fA-F]{8}"),
    "Port GUID": _GUID, "Link layer": re.compile("InfiniBand|Ethernet|Unspecified|Unknown|IB"),
}  # fmt: skip
# Lines that are not output of ibstat: its complaints on stderr, and the shell's prompt. They may precede any line.
_COMPLAINT = re.compile(r"(?:ibpanic|ibwarn|iberror): .*")
_DEVICE = re.compile(r"IB device '([^']+)'")
_PROMPT = re.compile(r"(?:\([\w.-]+\) ?)?(?:\[[^\]]*\]|[\w.@:~/+-]*(?: [~/][\w./-]*)?) ?[$#%>❯](?: .*)?")
_OWN = ("CA type", "Physical state")  # keys that no other command prints
_ADAPTER_NAMES = {"ca_type": "CA type", "nports": "Number of ports", "fw": "Firmware version"}
_PORT_NAMES = {
    "state": "State", "phys": "Physical state", "rate": "Rate", "base_lid": "Base lid", "sm_lid": "SM lid",
    "link_layer": "Link layer",
}  # fmt: skip


@dataclass
class _Section:
    """A header and the keys under it."""

    name: str
    line: int
    values: dict[str, str] = field(default_factory=dict)
    ports: list[_Section] = field(default_factory=list)


def answer_ibstat(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (values of `KEYS` before the first damaged line, the warning that names this line) for output of ibstat.

    Raises:
        CheckFailedError: `text` is not the output of ibstat.
    """
    sections, warnings = _read(text)
    adapters = [_entry(section) for section in sections]
    ports = [(f"{adapter['name']}:{port['port']}", port) for adapter in adapters for port in adapter["ports"]]
    states = {name: (port.get("state"), port.get("phys")) for name, port in ports}
    # LinkUp alone is not enough: a subnet manager must have activated the port.
    active = [(name, port.get("link_layer")) for name, port in ports if states[name] == ("Active", "LinkUp")]
    idle = {name: pair for name, pair in states.items() if None not in pair and pair != ("Active", "LinkUp")}
    facts: dict[str, Any] = {
        "ca_count": len(adapters),
        "ca_names_in_order": [adapter["name"] for adapter in adapters],
        "port_count": len(ports),
        "active_ports": len(active),
        "active_infiniband": [name for name, layer in active if layer in ("InfiniBand", "IB")],
        "active_ethernet": [name for name, layer in active if layer == "Ethernet"],
        "not_active": [f"{name} {state}/{physical}" for name, (state, physical) in idle.items()],
        "cas": adapters,
    }
    return facts | (dict.fromkeys(_COUNTS) if warnings else {}), warnings


def _read(text: str) -> tuple[list[_Section], tuple[str, ...]]:
    lines, cut = read_lines(text)
    if not any(_ADAPTER_LINE.fullmatch(line.text.strip()) or line.text.strip().startswith(_OWN) for line in lines):
        raise refusal("ibstat", lines)
    sections: list[_Section] = []
    for line in [line for line in lines if _PROMPT.fullmatch(line.text.strip())]:
        lines.remove(line)
    for line in [line for line in lines if _COMPLAINT.fullmatch(line.text.strip())]:
        lines.remove(line)
        device = _DEVICE.search(line.text)
        lacks = f"the output lacks {device[1]}" if device else "the output may be incomplete"
        cut.append(f"line {line.number}: {lacks}: {line.text.strip()[:60]!r}")
    for line in lines:
        if problem := _take(line, sections):
            return sections, first_damaged([f"line {line.number}: {problem}: {line.text.strip()[:60]!r}", *cut])
    return sections, first_damaged([*_missing(sections), *cut])


def _take(line: Line, sections: list[_Section]) -> str:
    """Read one line into the last section; return what is wrong with the line, or ""."""
    text = line.text.strip()
    if header := _ADAPTER_LINE.fullmatch(text):
        if any(section.name == header[1] for section in sections):
            return f"adapter {header[1]} occurs twice"
        sections.append(_Section(header[1], line.number))
        return ""
    match = _PORT_LINE.fullmatch(text) or _KEY_LINE.fullmatch(text)
    if match is None or not sections:
        return "not part of an adapter"
    adapter = sections[-1]
    if match.re is _PORT_LINE:
        if adapter.ports and int(adapter.ports[-1].name) >= int(match[1]):
            return f"port {match[1]} follows port {adapter.ports[-1].name}"
        adapter.ports.append(_Section(match[1], line.number))
        return ""
    forms: Mapping[str, re.Pattern[str]] = _ADAPTER_KEYS
    if adapter.name.startswith("mlx5_"):
        forms = {**_ADAPTER_KEYS, **_MLX5_KEYS}
    return _put(adapter.ports[-1] if adapter.ports else adapter, _PORT_KEYS if adapter.ports else forms, match)


def _put(section: _Section, forms: Mapping[str, re.Pattern[str]], match: re.Match[str]) -> str:
    key, value, order = match[1], (match[2] or "").strip(), list(forms)
    if key not in forms:
        return "not part of an adapter"
    if any(order.index(other) >= order.index(key) for other in section.values):
        return f"{key} is out of order"
    if not forms[key].fullmatch(value):
        return f"invalid value of {key}"
    section.values[key] = value
    return ""


def _missing(sections: Sequence[_Section]) -> list[str]:
    """Return warnings about adapters with missing ports, and sections without a key that other sections have."""
    warnings = []
    for section in sections:
        claimed = section.values.get("Number of ports")
        if claimed is not None and int(claimed) != len(section.ports):
            warnings.append(
                f"line {section.line}: expected {int(claimed)} ports of {section.name}, got {len(section.ports)}"
            )
    # `ibstat CA PORT` prints a single port below an adapter name without the other keys of the adapter.
    adapters = [section for section in sections if section.values or not section.ports]
    ports = [port for section in sections for port in section.ports]
    for forms, group, what in ((_ADAPTER_KEYS, adapters, "adapter"), (_PORT_KEYS, ports, "port")):
        expected = [key for key in forms if len(group) == 1 or any(key in section.values for section in group)]
        for section in group:
            if missing := [key for key in expected if key not in section.values]:
                warnings.append(f"line {section.line}: {what} {section.name} has no {', '.join(missing)}")
    return warnings


def _entry(section: _Section) -> dict[str, Any]:
    """Return one entry of `cas`, without the keys that are not printed."""
    entry: dict[str, Any] = {"name": section.name, **_chosen(section, _ADAPTER_NAMES)}
    return {**entry, "ports": [{"port": int(port.name), **_chosen(port, _PORT_NAMES)} for port in section.ports]}


def _chosen(section: _Section, names: Mapping[str, str]) -> dict[str, Any]:
    values = {name: section.values[key] for name, key in names.items() if key in section.values}
    return {
        name: _number(value) if name in ("nports", "rate", "base_lid", "sm_lid") else value
        for name, value in values.items()
    }


def _number(value: str) -> int | float:
    number = float(value.partition(" ")[0])
    return int(number) if number.is_integer() else number

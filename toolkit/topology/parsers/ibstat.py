"""Read `ibstat`: host channel adapters, their ports, state, rate and link layer.

Nesting is taken from the keys, not from the indentation, which mails and logs lose.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ADAPTER_LINE = re.compile(r"CA '([^']+)'$")
PORT_LINE = re.compile(r"Port ([0-9]{1,4}):$")
KEY_LINE = re.compile(r"([A-Z][A-Za-z ]*):\s*(.*)$")


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


@dataclass
class _Section:
    """Keys and values of one adapter or port, while its lines are being read."""

    name: str
    line: int
    values: dict[str, str] = field(default_factory=dict)
    ports: list[_Section] = field(default_factory=list)


def parse_ibstat(text: str) -> tuple[tuple[Adapter, ...], tuple[str, ...]]:
    """Read the whole output: (adapters in printed order, warnings that name the damaged lines)."""
    warnings: list[str] = []
    sections: list[_Section] = []
    current: _Section | None = None
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line:
            continue
        if match := ADAPTER_LINE.match(line):
            current = _Section(match[1], number)
            sections.append(current)
        elif sections and (match := PORT_LINE.match(line)):
            current = _Section(match[1], number)
            sections[-1].ports.append(current)
        elif current and (match := KEY_LINE.match(line)):
            current.values[match[1]] = match[2]
        else:
            warnings.append(f"line {number}: not part of an adapter: {line[:60]!r}")
    return tuple(_adapter(section, warnings) for section in sections), tuple(warnings)


def _adapter(section: _Section, warnings: list[str]) -> Adapter:
    count = _number(section, "Number of ports", warnings)
    if count is not None and count != len(section.ports):
        warnings.append(f"line {section.line}: {section.name} has {count:g} ports but {len(section.ports)} are printed")
    return Adapter(
        name=section.name,
        type=section.values.get("CA type"),
        firmware=section.values.get("Firmware version"),
        port_count=None if count is None else int(count),
        ports=tuple(_port(port, warnings) for port in section.ports),
    )


def _port(section: _Section, warnings: list[str]) -> Port:
    base_lid = _number(section, "Base lid", warnings)
    manager_lid = _number(section, "SM lid", warnings)
    return Port(
        number=int(section.name),
        state=section.values.get("State"),
        physical_state=section.values.get("Physical state"),
        rate_gb_per_s=_number(section, "Rate", warnings),
        base_lid=None if base_lid is None else int(base_lid),
        subnet_manager_lid=None if manager_lid is None else int(manager_lid),
        link_layer=section.values.get("Link layer"),
    )


def _number(section: _Section, key: str, warnings: list[str]) -> float | None:
    text = section.values.get(key)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        warnings.append(f"line {section.line}: {key} of {section.name!r} is not a number: {text[:60]!r}")
        return None
    return float(text)

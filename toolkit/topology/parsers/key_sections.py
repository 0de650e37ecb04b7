"""Sections of `key: value` lines under a header, as the fabric commands print them, and what tells that one is damaged.

The keys of a section come in a fixed order, each once, and each has a form. A value that has not its form is unknown,
and so is a key that stands there with two values: one of its lines belongs to a section whose header is lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.topology.parsers.device_names import is_odd_device
from toolkit.topology.parsers.fabric_lines import Line


@dataclass
class Section:
    """A header and the keys under it; the value of a key whose line is damaged is None."""

    name: str
    line: int
    values: dict[str, str | None] = field(default_factory=dict)
    parts: list[Section] = field(default_factory=list)

    def get(self, key: str) -> str | None:
        """What is printed for a key, None when nothing is or its line is damaged."""
        return self.values.get(key)

    def number(self, key: str) -> int | None:
        """The same as a number, with or without 0x."""
        text = self.values.get(key)
        return None if text is None else int(text, 0 if text.startswith("0x") else 10)

    def chosen(self, names: Mapping[str, str]) -> dict[str, str | None]:
        """The printed values under other names: what is not printed is left out, what is damaged is None."""
        return {name: self.values[key] for name, key in names.items() if key in self.values}


@dataclass(frozen=True)
class Keys:
    """The keys of one sort of section in their order, with the form of their values.

    `whole` are those whose values are words of a closed list, which are right even where the text is cut behind them.
    """

    forms: Mapping[str, re.Pattern[str]]
    whole: frozenset[str] = frozenset()

    def put(self, section: Section, key: str, value: str, line: Line, warnings: list[str]) -> bool:
        """Read one line into the section; False where it begins another one, whose header is lost."""
        if key in section.values:
            if section.values[key] == value:
                warnings.append(f"line {line.number}: {key} is printed a second time")
                return key == next(reversed(section.values))  # a line that is doubled follows itself
            warnings.append(f"line {line.number}: a second {key} in one section, so that neither counts")
            section.values[key] = None
            return False
        order = list(self.forms)
        if any(order.index(other) > order.index(key) for other in section.values):
            warnings.append(f"line {line.number}: {key} stands behind keys that are printed after it")
        fits = self.forms[key].fullmatch(value)
        if not fits:
            warnings.append(f"line {line.number}: {key} is not read from {value[:60]!r}")
        section.values[key] = value if fits and (not line.cut or key in self.whole) else None
        return True

    def put_in_port(
        self, here: Section | None, key: str, value: str, line: Line, warnings: list[str], *, begins: tuple[str, str]
    ) -> Section | None:
        """Read one line into the port `here`, and give the port that the next line belongs to; None where it is lost.

        Args:
            begins: a key that stands first in a port, and a later one: behind that, the first belongs to another port.
        """
        first, later = begins
        if here and key == first and later in here.values:
            warnings.append(f"line {line.number}: the header of a port is lost")
            here = None
        if here is None:
            warnings.append(f"line {line.number}: {key} belongs to no port; it is not read")
            return None
        return here if self.put(here, key, value, line, warnings) else None

    def warn_of_missing(self, sections: Sequence[Section], what: str, warnings: list[str]) -> None:
        """Name the sections without a key that others have; one that stands alone should have all of them."""
        asked = [key for key in self.forms if len(sections) == 1 or any(key in one.values for one in sections)]
        for section in sections:
            missing = [key for key in asked if key not in section.values]
            if missing:
                warnings.append(f"line {section.line}: {what} {section.name} is without {', '.join(missing)}")


def one_of(*words: str) -> re.Pattern[str]:
    """The form of a value that is one of some words."""
    return re.compile("|".join(map(re.escape, words)))


class Devices:
    """Devices that are read line by line, with keys of their own and keys of the ports that are their parts.

    What stands below a header that is lost is given to nobody.
    """

    def __init__(self, device_keys: Keys, port_keys: Keys, warnings: list[str]) -> None:
        self.sections: list[Section] = []
        self._device_keys, self._port_keys, self._warnings = device_keys, port_keys, warnings
        self._here: Section | None = None  # the device that the next line belongs to

    def knows(self, key: str) -> bool:
        """Whether it is a key of a device or of a port."""
        return key in self._device_keys.forms or key in self._port_keys.forms

    def begin_device(self, name: str, line: Line) -> None:
        """Read a device's header."""
        last = self._here
        if last and last.name == name and not last.values and not last.parts:
            self._warn(line.number, f"the header of {name} is printed a second time")
            return
        if any(section.name == name for section in self.sections):
            self._warn(line.number, f"{name} is printed a second time")
        if is_odd_device(name):
            self._warn(line.number, f"{name!r} is no usual name of a device")
        self._here = Section(name, line.number)
        self.sections.append(self._here)

    def begin_port(self, number: str, line: Line) -> None:
        """Read a port's header."""
        last = self._here.parts[-1] if self._here and self._here.parts else None
        if self._here is None:
            self._warn(line.number, f"port {number} belongs to no device; it is not read")
        elif last and last.name == number and not last.values:
            self._warn(line.number, f"the header of port {number} is printed a second time")
        elif last and int(last.name) >= int(number):
            self._warn(line.number, f"port {number} behind port {last.name}: a device's header is lost")
            self._here = None
        else:
            self._here.parts.append(Section(number, line.number))

    def put(self, key: str, value: str, line: Line) -> None:
        """Read a key of a device or of a port."""
        of_device = key in self._device_keys.forms
        if self._here and of_device and not self._here.parts:
            goes_on = self._device_keys.put(self._here, key, value, line, self._warnings)
        elif self._here and not of_device and self._here.parts:
            goes_on = self._port_keys.put(self._here.parts[-1], key, value, line, self._warnings)
        else:
            self._warn(line.number, f"{key} belongs to nothing above it; it is not read")
            goes_on = not of_device
        if not goes_on:
            self._here = None

    def check(self, count_key: str) -> None:
        """Look for missing keys, and for as many ports as `count_key` says."""
        for section in self.sections:
            count, here = section.number(count_key), len(section.parts)
            if count is not None and count != here:
                self._warn(section.line, f"{section.name} has {count} ports but {here} are printed")
        # A port that was asked for alone stands under the bare name of its device.
        devices = [section for section in self.sections if section.values or not section.parts]
        self._device_keys.warn_of_missing(devices, "device", self._warnings)
        ports = [port for section in self.sections for port in section.parts]
        self._port_keys.warn_of_missing(ports, "port", self._warnings)

    def _warn(self, number: int, what: str) -> None:
        self._warnings.append(f"line {number}: {what}")


def begin_port(
    device: str, port: str, here: Section | None, sections: list[Section], line: Line, warnings: list[str]
) -> Section:
    """The section of a port by its header, added to `sections`; a header that only follows itself begins none."""
    name = f"{device}:{port}"
    if any(section.name == name for section in sections):
        warnings.append(f"line {line.number}: {name} is printed a second time")
        if here and here.name == name and not here.values:
            return here
    if is_odd_device(device):
        warnings.append(f"line {line.number}: {device!r} is no usual name of a device")
    sections.append(Section(name, line.number))
    return sections[-1]

"""The lines below the rows of `nvidia-smi topo -m`: the meaning of its words and the devices of its NICs."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from toolkit.topology.readers.lines import Line

_TITLE = re.compile(r"(?:NIC )?Legend:")
_WORD = re.compile(r"(?:X|SYS|SOC|NODE|PHB|PXB|PIX|NV#)\s*= [^=]*")
_NIC = re.compile(r"(NIC[0-9]{1,4}):\s+([\w.-]+)", re.ASCII)


def read_legend(lines: Sequence[Line], nics: Collection[str], warnings: list[str]) -> dict[str, str]:
    """The device of each NIC of `nics` that the NIC legend names; damage is added to the warnings."""
    devices: dict[str, str] = {}
    contested: set[str] = set()
    for line in lines:
        text = line.text.strip()
        if match := _NIC.fullmatch(text):
            others = {nic for nic, device in devices.items() if (nic == match[1]) != (device == match[2])}
            if others or match[1] not in nics:
                warnings.append(f"line {line.number}: {match[1]} or {match[2]} has another meaning in an earlier line")
                contested |= {*others, match[1]}
            devices[match[1]] = match[2]
        elif text and not _TITLE.fullmatch(text) and not _WORD.fullmatch(text):
            warnings.append(f"line {line.number}: neither a row nor a legend: {text[:60]!r}")
    missing = [nic for nic in nics if nic not in devices]
    if missing:
        at = lines[-1].number if lines else 1
        warnings.append(f"line {at}: the NIC legend lacks {', '.join(missing)}")
    return {nic: device for nic, device in devices.items() if nic not in contested}

"""What stands below the rows of `nvidia-smi topo -m`: the meaning of its words and the names of its NICs."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from toolkit.topology.parsers.lines import Line

_TITLE = re.compile(r"(?:NIC )?Legend:")
_WORD = re.compile(r"(X|SYS|SOC|NODE|PHB|PXB|PIX|NV#)\s*= (?:Self|(?:Connection|Path) travers)")
_NIC = re.compile(r"(NIC[0-9]{1,4}):\s+(\S+)")
# Drivers up to 375 print the first, the second or the third, since then the fourth.
_LEGENDS = (
    ["X", "SOC", "PHB", "PXB", "PIX"],
    ["X", "SOC", "PHB", "PXB", "PIX", "NV#"],
    ["X", "SYS", "PHB", "PXB", "PIX", "NV#"],
    ["X", "SYS", "NODE", "PHB", "PXB", "PIX", "NV#"],
)


def read_legend(
    lines: Sequence[Line], nics: Collection[str], used: Collection[str], *, cut: bool
) -> tuple[dict[str, str], list[Line], list[str]]:
    """Read both legends: (devices by the name of their NIC, lines that belong to neither, warnings).

    `nics` are the NIC columns, `used` the words that stand in the cells; `cut` tells that the last line has no end.
    """
    warnings: list[str] = []
    words: list[str] = []
    devices: dict[str, str] = {}
    others: list[Line] = []
    titles: dict[str, int] = {}
    for line in lines:
        text = line.text.strip()
        if _TITLE.fullmatch(text):
            if text in titles:
                warnings.append(f"line {line.number}: a second {text!r}")
            titles.setdefault(text, line.number)
        elif match := _WORD.match(text):
            words.append(match[1])
            if " = " in text[match.end() :]:
                warnings.append(f"line {line.number}: two lines of the legend in one: {text[-60:]!r}")
        elif match := _NIC.fullmatch(text):
            if match[1] in devices or match[2] in devices.values():
                warnings.append(f"line {line.number}: {match[1]} or {match[2]} stands in the NIC legend twice")
            devices.setdefault(match[1], match[2])
        elif text:
            others.append(line)
    if cut and lines and (match := _NIC.fullmatch(lines[-1].text.strip())):
        devices.pop(match[1], None)
    where = f"line {titles.get('Legend:', lines[0].number if lines else 1)}"
    if words or titles:
        warnings += _words_of_no_driver(where, words, used)
    if words and "Legend:" not in titles:
        warnings.append(f"{where}: a legend without its title")
    numbered = [nic for nic in nics if re.fullmatch(r"NIC[0-9]+", nic)]
    if numbered and list(devices) != numbered:
        place = titles.get("NIC Legend:", lines[-1].number if lines else 1)
        missing = [nic for nic in numbered if nic not in devices]
        warnings.append(
            f"line {place}: the NIC legend lacks {', '.join(missing)}"
            if missing
            else f"line {place}: the NIC legend names {', '.join(devices)}, the columns are {', '.join(numbered)}"
        )
    if len(devices) > 1 and sum(name[-1].isdigit() for name in devices.values()) == len(devices) - 1:
        odd = next(name for name in devices.values() if not name[-1].isdigit())
        warnings.append(f"line {titles.get('NIC Legend:', 1)}: {odd!r} has no number, as the other devices have")
    return {nic: device for nic, device in devices.items() if nic in numbered}, others, warnings


def _words_of_no_driver(where: str, words: list[str], used: Collection[str]) -> list[str]:
    if words in _LEGENDS:
        return []
    begins = any(words == legend[: len(words)] for legend in _LEGENDS)
    if not begins and set(words) == {"NV#" if word.startswith("NV") else word for word in used}:
        return []  # somebody left what the cells do not need
    nearest = min(_LEGENDS, key=lambda legend: len(set(legend) ^ set(words)))
    missing = [word for word in nearest if word not in words]
    return [
        f"{where}: the legend lacks {', '.join(missing)}"
        if missing
        else f"{where}: the legend's lines are not in a driver's order: {', '.join(words)}"
    ]

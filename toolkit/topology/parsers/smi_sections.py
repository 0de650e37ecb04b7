"""The layout of `nvidia-smi -q`: one block for each GPU, of sections in sections, with `Key   : value` lines.

The layout says a lot about itself: colons stand in one column, sections are indented by four blanks and are never
empty, and GPUs of one model have the same keys in the same order.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from toolkit.topology.parsers.lines import Line

_GPU = re.compile(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])")
_KEY_LINE = re.compile(r"(\S(?:.*?\S)?)\s* :(?: (.*))?")
_RULED = re.compile(r"=+ ?NVSMI LOG ?=+")
# What differs between GPUs of one model: their processes, and the parts they are divided in.
_VARIES = re.compile(r"Process|MIG Device|Compute Instance|GPU Instance|Accounted|vGPU|Vgpu")
INDENT = 4
# Keys that a section has in every driver, if it is there and not empty.
_KEYS_OF = {
    **dict.fromkeys(("MIG Mode", "Driver Model", "GPU Operation Mode", "ECC Mode", "Ecc Mode"), ("Current", "Pending")),
    **dict.fromkeys(("PCIe Generation", "Link Width"), ("Max", "Current")),
    **dict.fromkeys(("FB Memory Usage", "BAR1 Memory Usage"), ("Total", "Used", "Free")),
    **dict.fromkeys(("Encoder Stats", "FBC Stats"), ("Active Sessions", "Average FPS", "Average Latency")),
    **dict.fromkeys(("Clocks", "Max Clocks"), ("Graphics", "SM", "Memory", "Video")),
    **dict.fromkeys(("Applications Clocks", "Default Applications Clocks"), ("Graphics", "Memory")),
    "PCI": ("Bus", "Device", "Domain", "Device Id", "Bus Id", "Sub System Id"),
    "Inforom Version": ("Image Version", "OEM Object", "ECC Object", "Power Management Object"),
    "Utilization": ("Gpu", "Memory", "Encoder", "Decoder"),
    "Bridge Chip": ("Type", "Firmware"),
    "Clock Policy": ("Auto Boost", "Auto Boost Default"),
    "Temperature": ("GPU Current Temp",),
    "Fabric": ("State", "Status"),
}


@dataclass(frozen=True)
class Entry:
    """One `Key : value` line and the sections that it stands in, the outermost first."""

    number: int
    sections: tuple[str, ...]
    key: str
    value: str


@dataclass
class Block:
    """What is printed of one GPU, or (`bus_id` None and the first) before all of them."""

    line: int
    bus_id: str | None
    entries: list[Entry] = field(default_factory=list)
    titles: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def get(self, *path: str) -> Entry | None:
        """The one entry under that section (or none) and key; None where it is missing or stands there twice."""
        found = [entry for entry in self.entries if (*entry.sections[-1:], entry.key) == path]
        return found[0] if len(found) == 1 else None

    def has(self, name: str) -> bool:
        """Whether a section or a key of that name is there."""
        return any(entry.key == name for entry in self.entries) or any(path[-1] == name for _, path in self.titles)


def read_blocks(lines: tuple[Line, ...], said: list[str]) -> tuple[list[Block], bool]:
    """Read every block: (the first for what stands before all GPUs, whether the line that begins the log is there)."""
    blocks = [Block(1, None)]
    begun = False
    stack: list[tuple[int, str]] = []
    flat = not any(line.text.startswith(" ") for line in lines)  # mails and tickets lose the blanks
    deepest = 0  # how far the next line may be indented
    for line in lines:
        words = line.text.strip()
        indent = len(line.text) - len(line.text.lstrip())
        if not words:
            continue
        if _RULED.fullmatch(words):
            if begun:
                said.append(f"line {line.number}: a second log, its GPUs are counted, too")
            begun = True
            continue
        if not flat and (indent % INDENT or indent > deepest):
            said.append(f"line {line.number}: indented by {indent}, {deepest} at most: {words[:60]!r}")
        if words.startswith("GPU ") and " : " not in words and indent == 0:
            match = _GPU.fullmatch(words)
            if not match:
                said.append(f"line {line.number}: no whole bus id: {words[:60]!r}")
            blocks.append(Block(line.number, match[1] if match else None))
            stack, deepest = [], INDENT
            continue
        while stack and (indent <= stack[-1][0] and not flat):
            stack.pop()
        if match := _KEY_LINE.fullmatch(words):
            sections = tuple(title for _, title in stack)
            blocks[-1].entries.append(Entry(line.number, sections, match[1], (match[2] or "").strip()))
            deepest = indent + INDENT  # some keys have keys below them: "HW Slowdown"
        elif ":" in words or len(blocks) == 1 or len(words) > 60:
            said.append(f"line {line.number}: no key and no section: {words[:60]!r}")
        else:
            stack = [] if flat else stack
            stack.append((indent, words))
            blocks[-1].titles.append((line.number, tuple(title for _, title in stack)))
            deepest = indent + INDENT
    return blocks, begun


def check_layout(lines: tuple[Line, ...], blocks: list[Block], said: list[str]) -> None:
    """Colons out of their column, empty sections, keys that stand twice, two lines in one."""
    places = {line.number: line.text.find(" : ") + 1 for line in lines}
    usual = Counter(place for place in places.values() if place).most_common(1)
    for line in lines:
        place = places[line.number]
        if (
            usual
            and place
            and (place < usual[0][0] or (place > usual[0][0] and line.text[place - 2 : place - 1] == " "))
        ):
            said.append(f"line {line.number}: its colon is not below the others': {line.text.strip()[:60]!r}")
    for block in blocks:
        seen: dict[tuple[tuple[str, ...], str], int] = {}
        filled = {entry.sections[:depth] for entry in block.entries for depth in range(1, len(entry.sections) + 1)}
        for entry in block.entries:
            if any(_VARIES.match(title) for title in (*entry.sections, entry.key)):
                continue
            # A timestamp pads its day: "Mon Mar  3".
            if " : " in entry.value or ("  " in entry.value and entry.key != "Timestamp"):
                said.append(f"line {entry.number}: two lines in one: {entry.key} : {entry.value[:60]}")
            first = seen.setdefault((entry.sections, entry.key), entry.number)
            if first != entry.number:
                said.append(f"line {entry.number}: {entry.key} a second time, also in line {first}")
        paths = Counter(path for _, path in block.titles)
        for number, path in block.titles:
            if any(_VARIES.match(title) for title in path):
                continue
            if path not in filled and not any(other[: len(path)] == path != other for other in filled):
                said.append(f"line {number}: nothing stands in {path[-1]}")
            keys = {entry.key for entry in block.entries if entry.sections == path}
            missing = [key for key in _KEYS_OF.get(path[-1], ()) if keys and key not in keys]
            if missing:
                said.append(f"line {number}: {path[-1]} lacks {', '.join(missing)}")
            if paths[path] > 1:
                said.append(f"line {number}: {path[-1]} stands there {paths[path]} times")


def check_alike(blocks: list[Block], said: list[str]) -> None:
    """GPUs of one model have the same keys in the same order."""
    forms: dict[int, tuple[tuple[str, ...], ...]] = {}
    for block in blocks:
        keys = sorted([(entry.number, (*entry.sections, entry.key)) for entry in block.entries] + block.titles)
        forms[block.line] = tuple(path for _, path in keys if not any(_VARIES.match(title) for title in path))
    models: dict[str, list[Block]] = {}
    for block in blocks:
        name = block.get("Product Name")
        models.setdefault(name.value if name else "", []).append(block)
    for alike in models.values():
        counts = Counter(forms[block.line] for block in alike)
        usual = max(counts, key=lambda form: (counts[form], len(form)))
        for block in alike:
            form = forms[block.line]
            if form != usual:
                missing = [path[-1] for path in usual if path not in form]
                more = [path[-1] for path in form if path not in usual]
                what = (
                    f"lacks {', '.join(missing[:3])}" if missing else f"has {', '.join(more[:3])}, too" if more else ""
                )
                said.append(f"line {block.line}: unlike the other GPUs of its kind it {what or 'has another order'}")

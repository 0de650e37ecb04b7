"""Read `nvidia-smi nvlink --status`: the NVLinks of each GPU, and how fast each is in one direction."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.gpu_names import odd_names
from toolkit.topology.parsers.lines import Line, lines_of

KEYS = {
    "gpu_count": "how many GPUs are printed; none where no GPU has NVLink",
    "gpus": "each of them: index, name, active and inactive (how many of its links are printed so; both 0 where a line "
    'says that all are inactive), speeds (how many links run at each, as "25.781 GB/s": Gbyte/s in one direction)',
}
_GPU = re.compile(r"GPU ([0-9]{1,4}): (\S.*?)(?: \(UUID: ((?:GPU|MIG)-[^()\s]+)\))")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NAMELESS_UUID = re.compile(r"GPU ([0-9]{1,4}): ([^()]*[^()\s])")  # as people publish it, without the UUID
_LINK = re.compile(r"Link ([0-9]{1,3}): (?:(<inactive>)|([0-9]{1,4}(?:\.[0-9]{1,3})? GB/s))")
_ALL_INACTIVE = re.compile(
    r"(?:NVML: )?Unable to retrieve NVLink information as all links are inactive\.?", re.IGNORECASE
)
_MESSAGE = re.compile(r"NVML: |Unable to (?:retrieve|determine|get|query) ", re.IGNORECASE)
_MIG = re.compile(r"MIG \S+ +Device +[0-9]+: \(UUID: MIG-\S+\)")
_NO_DEVICES = re.compile(r"No devices were found\.?", re.IGNORECASE)
_OTHER_FLAG = re.compile(
    r"Link [0-9]+(?:, |: (?:[A-Z]\w+ ){1,3}.*: )"
)  # --capabilities, --errorcounters, --remotelinkinfo


@dataclass(frozen=True)
class GpuLinks:
    """The links of one GPU. `speed_gbyte_per_s[link]` is in one direction, None for a link that is inactive.

    `index` and `name` are None where their line is damaged. `told_inactive`: the driver says of all links at once that
    they are inactive, and lists none.
    """

    index: int | None
    name: str | None
    uuid: str | None
    speed_gbyte_per_s: dict[int, float | None]
    speeds_as_printed: dict[str, int]
    told_inactive: bool


@dataclass
class _Section:
    line: int
    index: int | None
    name: str | None
    uuid: str | None
    links: dict[int, str | None] = field(default_factory=dict)
    lines: dict[int, int] = field(default_factory=dict)
    told: bool = False
    message: str = ""


def parse_nvidia_smi_nvlink(text: str) -> tuple[tuple[GpuLinks, ...], tuple[str, ...]]:
    """Read the whole output: (GPUs as printed, warnings that name the damaged lines).

    A text of blanks is read as no GPU: that is what machines without NVLink print.

    Raises:
        CheckFailedError: no line of it is one of this command.
    """
    lines, warnings = lines_of(text)
    said = list(warnings)
    if not text:
        said.append("line 1: there is nothing: no GPU has NVLink, or the text was lost")
    sections: list[_Section] = []
    answered = False
    others: list[Line] = []
    for line in lines:
        words = line.text.strip()
        if not words or _MIG.fullmatch(words):
            continue
        if words.startswith("GPU") or "(UUID" in words:
            _begin(line.number, words, sections, said)
        elif match := _LINK.fullmatch(words):
            _add_link(line.number, int(match[1]), match[3], sections, said)
        elif _ALL_INACTIVE.fullmatch(words):
            answered = True
            if not sections or sections[-1].told:
                said.append(f"line {line.number}: behind no line of a GPU, or a second time")
            else:
                sections[-1].told = True
        elif _MESSAGE.match(words):
            answered = True
            said.append(f"line {line.number}: the links are not told: {words[:80]!r}")
            if sections:
                sections[-1].message = words
        elif _NO_DEVICES.fullmatch(words):
            answered = True
        else:
            others.append(line)
    if not answered and not any(section.links or section.index is not None for section in sections):
        shown = next((line for line in lines if line.text.strip()), None)
        if shown is not None:
            raise CheckFailedError(f"no GPU and no NVLink: {shown.text.strip()[:60]!r}", where=f"line {shown.number}")
    flag = next((line for line in others if _OTHER_FLAG.match(line.text.strip())), None)
    if flag and not any(section.links for section in sections):
        raise CheckFailedError(
            f"this is not the status of links: {flag.text.strip()[:60]!r}",
            where=f"line {flag.number}",
            fix="give the output of `nvidia-smi nvlink --status`",
        )
    said += [f"line {line.number}: no GPU and no link: {line.text.strip()[:60]!r}" for line in others]
    _compare(sections, said)
    return tuple(_gpu(section) for section in sections), tuple(said)


def answer_nvidia_smi_nvlink(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output: (values of `KEYS`, warnings that name the damaged lines).

    Raises:
        CheckFailedError: no line of it is one of this command.
    """
    gpus, warnings = parse_nvidia_smi_nvlink(text)
    entries = [
        {
            "index": gpu.index,
            "name": gpu.name,
            "active": sum(gpu.speeds_as_printed.values()),
            "inactive": sum(speed is None for speed in gpu.speed_gbyte_per_s.values()),
            "speeds": gpu.speeds_as_printed,
        }
        for gpu in gpus
    ]
    return {"gpu_count": len(entries), "gpus": entries}, warnings


def _begin(number: int, words: str, sections: list[_Section], said: list[str]) -> None:
    """A line that begins a GPU."""
    match = _GPU.fullmatch(words)
    if match and not _UUID.fullmatch(match[3]):
        said.append(f"line {number}: {match[3][:60]!r} is no whole UUID")
    if not match and (match := _NAMELESS_UUID.fullmatch(words)) and "UUID" not in words:
        said.append(f"line {number}: GPU {match[1]} has no UUID")
        sections.append(_Section(number, int(match[1]), match[2], None))
        return
    if not match or _LINK.search(words):
        said.append(f"line {number}: not whole: {words[:80]!r}")
        sections.append(_Section(number, None, None, None))
        return
    index, name, uuid = int(match[1]), match[2], match[3]
    seen = next((section for section in sections if section.index == index and section.uuid == uuid), None)
    if seen is not None:
        said.append(f"line {number}: GPU {index} a second time, also in line {seen.line}")
        sections.remove(seen)
        sections.append(seen)
        return
    twin = next((section for section in sections if section.index == index or section.uuid == uuid), None)
    if twin is not None:
        said.append(f"line {number}: index {index} or its UUID stands in line {twin.line}, too")
    elif sections and sections[-1].index is not None and index != sections[-1].index + 1:
        said.append(f"line {number}: GPU {index} follows GPU {sections[-1].index}")
    sections.append(_Section(number, index, name, uuid))


def _add_link(number: int, link: int, speed: str | None, sections: list[_Section], said: list[str]) -> None:
    if not sections:
        said.append(f"line {number}: Link {link} of no GPU, ignored")
        return
    section = sections[-1]
    if link in section.links:
        said.append(f"line {number}: Link {link} a second time, also in line {section.lines[link]}; ignored")
        return
    expected = max(section.links, default=-1) + 1
    if link != expected:
        said.append(f"line {number}: Link {link} where Link {expected} is due")
    section.links[link] = speed
    section.lines[link] = number


def _compare(sections: list[_Section], said: list[str]) -> None:
    """GPUs of one model have as many links, and links of one speed."""
    speeds = Counter((section.name, speed) for section in sections for speed in section.links.values() if speed)
    counts = Counter((section.name, len(section.links)) for section in sections if section.links)
    for section in sections:
        of_model = {speed: count for (name, speed), count in speeds.items() if name == section.name}
        usual = max(of_model, key=lambda speed: of_model[speed], default=None)
        said += [
            f"line {section.lines[link]}: Link {link} runs at {speed}, others at {usual}: slow, or a damaged line"
            for link, speed in section.links.items()
            if speed and speed != usual
        ]
        most = max((count for (name, count) in counts if name == section.name), default=0)
        if section.links and section.told:
            said.append(f"line {section.line}: links are printed, although all are said to be inactive")
        elif not section.links and not section.told and not section.message:
            said.append(f"line {section.line}: no link is printed")
        elif section.links and len(section.links) != most:
            said.append(f"line {section.line}: {len(section.links)} links, others of its kind have {most}")
    odd = odd_names(section.name for section in sections if section.name)
    said += [f"line {section.line}: {odd[section.name]}" for section in sections if section.name in odd]


def _gpu(section: _Section) -> GpuLinks:
    return GpuLinks(
        index=section.index,
        name=section.name,
        uuid=section.uuid,
        speed_gbyte_per_s={
            link: None if speed is None else float(speed.split()[0]) for link, speed in section.links.items()
        },
        speeds_as_printed=dict(Counter(speed for speed in section.links.values() if speed is not None)),
        told_inactive=section.told,
    )

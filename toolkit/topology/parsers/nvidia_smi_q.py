"""Read `nvidia-smi -q`: the driver, and of each GPU its bus id, name, MIG and ECC mode and the state of its fabric."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.gpu_names import odd_names
from toolkit.topology.parsers.lines import Line, lines_of
from toolkit.topology.parsers.smi_sections import Block, Entry, check_alike, check_layout, read_blocks

_ONCE = "as printed, each value once, in the order of the GPUs; empty where the driver prints none"
KEYS = {
    "driver": "the version of the driver, as printed",
    "cuda": "the newest CUDA that the driver serves, as printed; null where the driver prints none",
    "attached_gpus": "how many GPUs the driver says there are",
    "gpu_blocks": "how many GPUs are printed",
    "bus_ids": "the bus id of each of them; null where its line is damaged",
    "product_names": f"their models, {_ONCE}",
    "fabric_state": f"whether they joined the NVLink fabric, {_ONCE}",
    "mig_current": f"whether they are divided by MIG, {_ONCE}",
    "ecc_current": f"whether they correct errors of their memory, {_ONCE}",
}
_VERSION = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,4}){1,3}|N/A|Not Found|ERR!")
_COUNT = re.compile(r"[0-9]{1,4}")
_REASONS = ("N/A", "Not Supported", "Unknown Error", "GPU requires reset", "GPU is lost", "Insufficient Permissions")
_REFUSALS = frozenset({*_REASONS, *(f"[{reason}]" for reason in _REASONS), "ERR!"})
_MODES = frozenset({"Enabled", "Disabled"}) | _REFUSALS
_FABRIC_STATES = frozenset({"Not Started", "In Progress", "Completed", "Unrecognized State"}) | _REFUSALS
# What every driver since 340 prints of every GPU, unless -d asks for a part.
_ALWAYS = """Product Name|Product Brand|Display Mode|Persistence Mode|Serial Number|GPU UUID|Minor Number|VBIOS Version|
    PCI|Fan Speed|Performance State|FB Memory Usage|Compute Mode|Utilization|Temperature|Clocks|Max Clocks|Processes"""
_ALWAYS_OF_A_GPU = [name.strip() for name in _ALWAYS.split("|")]
_SINCE = {"MIG Mode": 450, "Fabric": 525}  # drivers that print them of every GPU
_NO_DEVICES = re.compile(r"No devices were found\.?", re.IGNORECASE)


@dataclass(frozen=True)
class QueriedGpu:
    """One GPU; what the text does not tell, or tells in damaged words, is None."""

    bus_id: str | None
    uuid: str | None
    product_name: str | None
    fabric_state: str | None
    mig_mode: str | None
    ecc_mode: str | None


@dataclass(frozen=True)
class GpuQuery:
    """The whole output."""

    driver: str | None
    cuda: str | None
    attached_gpus: int | None
    gpus: tuple[QueriedGpu, ...]


def parse_nvidia_smi_q(text: str) -> tuple[GpuQuery, tuple[str, ...]]:
    """Read the whole output, also of `-q -d ...`: (facts, warnings that name the damaged lines).

    Raises:
        CheckFailedError: no line of it is one of this command.
    """
    lines, warnings = lines_of(text)
    said = list(warnings)
    shown = next((line for line in lines if line.text.strip()), Line(1, ""))
    if shown.text.lstrip().startswith("<?xml"):
        raise CheckFailedError("this is XML, which is not read", where="line 1", fix="give what is printed without -x")
    if any(_NO_DEVICES.fullmatch(line.text.strip()) for line in lines):
        return GpuQuery(None, None, None, ()), warnings
    aside: list[str] = []
    (head, *blocks), begun = read_blocks(lines, aside)
    if not (
        begun or any(block.bus_id for block in blocks) or any(entry.key == "Attached GPUs" for entry in head.entries)
    ):
        raise CheckFailedError(
            f"neither a log of nvidia-smi's nor a GPU: {shown.text.strip()[:60]!r}", where=f"line {shown.number}"
        )
    said += aside
    check_layout(lines, [head, *blocks], said)
    check_alike(blocks, said)
    if not begun:
        said.append("line 1: the line NVSMI LOG is not there, so that the text may lack its begin")
    driver = _value(_first(head, "Driver Version", "KMD Version"), _VERSION, said)
    for firmware in (block.get("GSP Firmware Version") for block in blocks):
        if driver and firmware and firmware.value not in (driver, "N/A") and _VERSION.fullmatch(firmware.value):
            said.append(
                f"line {firmware.number}: firmware {firmware.value} under driver {driver}: neither can be trusted"
            )
            driver = None
    release = int(driver.split(".")[0]) if driver and driver[0].isdigit() else 0
    query = GpuQuery(
        driver=driver,
        cuda=_value(_first(head, "CUDA Version", "CUDA UMD Version", "CUDA Driver Version"), _VERSION, said),
        attached_gpus=_number(head.get("Attached GPUs"), said),
        gpus=tuple(_gpu(block, blocks, release, said) for block in blocks),
    )
    said += [f"line {head.line}: {key} is not there" for key in ("Timestamp", "Attached GPUs") if not head.get(key)]
    if query.driver is None:
        said.append(f"line {head.line}: no version of a driver")
    if query.attached_gpus not in (None, len(blocks)):
        said.append(f"line {head.line}: {query.attached_gpus} GPUs are attached, {len(blocks)} are printed")
    _check_names(blocks, said)
    return query, tuple(said)


def answer_nvidia_smi_q(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output: (values of `KEYS`, warnings that name the damaged lines).

    Raises:
        CheckFailedError: no line of it is one of this command.
    """
    query, warnings = parse_nvidia_smi_q(text)
    return {
        "driver": query.driver,
        "cuda": query.cuda,
        "attached_gpus": query.attached_gpus,
        "gpu_blocks": len(query.gpus),
        "bus_ids": [gpu.bus_id for gpu in query.gpus],
        "product_names": _once(gpu.product_name for gpu in query.gpus),
        "fabric_state": _once(gpu.fabric_state for gpu in query.gpus),
        "mig_current": _once(gpu.mig_mode for gpu in query.gpus),
        "ecc_current": _once(gpu.ecc_mode for gpu in query.gpus),
    }, warnings


def _once(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value is not None))


def _first(block: Block, *keys: str) -> Entry | None:
    return next((entry for key in keys if (entry := block.get(key))), None)


def _value(entry: Entry | None, form: re.Pattern[str], said: list[str]) -> str | None:
    if entry is None:
        return None
    if form.fullmatch(entry.value):
        return entry.value
    said.append(f"line {entry.number}: {entry.key} is not whole: {entry.value[:60]!r}")
    return None


def _number(entry: Entry | None, said: list[str]) -> int | None:
    value = _value(entry, _COUNT, said)
    return None if value is None else int(value)


def _word(entry: Entry | None, words: frozenset[str], said: list[str]) -> str | None:
    if entry is None:
        return None
    if entry.value in words:
        return entry.value
    said.append(f"line {entry.number}: {entry.value[:60]!r} is no {entry.sections[-1]}, {entry.key}")
    return None


def _gpu(block: Block, blocks: list[Block], release: int, said: list[str]) -> QueriedGpu:
    if sum(other.bus_id == block.bus_id for other in blocks) > 1:
        said.append(f"line {block.line}: a second GPU at {block.bus_id}, or both are damaged")
    if sum(block.has(name) for name in _ALWAYS_OF_A_GPU) > 5:
        missing = [name for name in _ALWAYS_OF_A_GPU if not block.has(name)]
        missing += ["ECC Mode"] * (not (block.has("ECC Mode") or block.has("Ecc Mode")))
        missing += [name for name, since in _SINCE.items() if release >= since and not block.has(name)]
        if missing:
            said.append(f"line {block.line}: the GPU is printed without {', '.join(missing[:5])}")
    name = block.get("Product Name")
    uuid = block.get("GPU UUID")
    ecc = block.get("ECC Mode", "Current") or block.get("Ecc Mode", "Current")
    for section in ("MIG Mode", "ECC Mode", "Ecc Mode"):
        if block.has(section) and not block.get(section, "Current"):
            said.append(f"line {block.line}: {section} of the GPU has no Current, or two")
    if block.has("Fabric") and not block.get("Fabric", "State"):
        said.append(f"line {block.line}: Fabric of the GPU has no State, or two")
    return QueriedGpu(
        bus_id=_bus_id(block, said),
        uuid=uuid.value if uuid else None,
        product_name=name.value if name and name.value and " : " not in name.value else None,
        fabric_state=_word(block.get("Fabric", "State"), _FABRIC_STATES, said),
        mig_mode=_word(block.get("MIG Mode", "Current"), _MODES, said),
        ecc_mode=_word(ecc, _MODES, said),
    )


def _bus_id(block: Block, said: list[str]) -> str | None:
    """The bus id of the block's first line, where what is printed of it below says the same."""
    told = block.get("PCI", "Bus Id")
    parts = [block.get("PCI", key) for key in ("Domain", "Bus", "Device")]
    if block.bus_id is None:
        return None
    if told and told.value.upper() != block.bus_id.upper():
        said.append(f"line {told.number}: Bus Id {told.value[:60]!r} of the GPU {block.bus_id} of line {block.line}")
        return None
    numbers = re.split(r"[:.]", block.bus_id)
    for part, number in zip(parts, numbers, strict=False):
        if part and not (re.fullmatch("0x[0-9A-Fa-f]+", part.value) and int(part.value, 16) == int(number, 16)):
            said.append(f"line {part.number}: {part.key} {part.value[:60]!r} of the GPU {block.bus_id}")
    return block.bus_id


def _check_names(blocks: list[Block], said: list[str]) -> None:
    entries = [entry for block in blocks if (entry := block.get("Product Name"))]
    odd = odd_names(entry.value for entry in entries)
    said += [f"line {entry.number}: {odd[entry.value]}" for entry in entries if entry.value in odd]
    uuids = [entry for block in blocks if (entry := block.get("GPU UUID"))]
    count = Counter(entry.value for entry in uuids)
    said += [f"line {entry.number}: a UUID that two GPUs have" for entry in uuids if count[entry.value] > 1]

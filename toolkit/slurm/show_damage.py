"""What shows that a record of `scontrol show` was damaged on its way: a value that has not its key's form loses it.

Records repeat themselves: a node's CPUs are its sockets times cores times threads and stand in its TRES again, a list of
nodes has as many as the number beside it. Where they differ both are kept, and named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.records import NOTHING, whole_number
from toolkit.slurm.show_fields import Block

MOSTLY = 0.6  # of the keys that every record has: then scontrol printed it, and no grep left these lines
SUREST = 3  # so many of them are asked of a record that stands alone and is not whole
_COUNT = re.compile(r"[0-9]+(\.[0-9]+)?[KMG]?(-[0-9]+(\.[0-9]+)?[KMG]?)?")
_NUMBER = re.compile(r"[0-9]+")
_TIME = re.compile(r"([0-9]+-)?[0-9]+:[0-9]{2}:[0-9]{2}|[A-Z][A-Za-z_/]+")
_ONE = r"[a-z][a-zA-Z_]*(/[\w.@-]+(:[\w.@-]+)*)?=[0-9]+(\.[0-9]+)?[KMGTPEZ]?"
_TRES = re.compile(rf"{_ONE}(,{_ONE})*")
_LIST = re.compile(r"[^\s,=()]+(\([^()]*\))?(,[^\s,=()]+(\([^()]*\))?)*")
FORMS = {
    "JobId": re.compile(r"[0-9]+([_+].*)?"), "ArrayJobId": _NUMBER, "ArrayTaskId": re.compile(r"[0-9,:%\[\].-]+"),
    "NumNodes": _COUNT, "NumCPUs": _COUNT, "TRES": _TRES, "AllocTRES": _TRES, "CfgTRES": _TRES, "RunTime": _TIME,
    "TimeLimit": _TIME, "MaxTime": _TIME, "Restarts": _NUMBER, "ExitCode": re.compile("[0-9]+:[0-9]+"), "CPUTot": _NUMBER,
    "CPUAlloc": _NUMBER, "CoresPerSocket": _NUMBER, "Sockets": _NUMBER, "ThreadsPerCore": _NUMBER, "RealMemory": _NUMBER,
    "Gres": _LIST, "Partitions": _LIST, "ActiveFeatures": _LIST, "Version": re.compile(r"[0-9]+\.[0-9]+\S*"),
    "Default": re.compile("YES|NO"), "TotalNodes": _COUNT, "TotalCPUs": _COUNT, "Partition": _LIST,
    "PartitionName": re.compile(r"\S+"), "NodeName": re.compile(r"[^\s=]+"),
}  # fmt: skip
_DAY = re.compile(r"\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b")
_DATE = re.compile(_DAY.pattern + r" [A-Z][a-z]{2} +[0-9]{1,2} [0-9]{2}:[0-9]{2}:[0-9]{2} \S+ [0-9]{4}$")
_ORDER = {
    name: rank for rank, name in enumerate(("cpu", "mem", "energy", "node", "billing", "fs/disk", "vmem", "pages"))
}
_MEGABYTES = {"": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
Check = Callable[[Block], Iterator[str]]


@dataclass(frozen=True)
class Sort:
    """What is known of one sort of record. `always` are keys that every one has, `state` the words of its State."""

    first: str
    always: Sequence[str]
    together: Mapping[str, Sequence[str]]  # keys that stand there where another one does
    state: tuple[str, Collection[str]]
    check: Check


def noticed(blocks: Sequence[Block], sort: Sort) -> tuple[str, ...]:
    """Warnings; values that have not the form of their key are taken away."""
    warnings: list[str] = []
    first: dict[str, int] = {}
    for block in blocks:
        warnings += block.damage
        warnings += _formless(block)
        warnings += _unknown_state(block, *sort.state)
        warnings += sort.check(block)
        name = block.get(sort.first)
        before = first.setdefault(name, block.line) if name else block.line
        if before != block.line:
            warnings.append(f"line {block.line}: {sort.first}={(name or '')[:60]} has a record on line {before}, too")
    return (*warnings, *_lacking(blocks, sort))


def _lacking(blocks: Sequence[Block], sort: Sort) -> Iterator[str]:
    """Of a whole record no key is missing; behind a grep all records lack the same ones."""
    held = [block.seen for block in blocks]
    whole = any(len([key for key in sort.always if key in seen]) >= MOSTLY * len(sort.always) for seen in held)
    anywhere = set().union(*held)
    usual = [key for key in sort.always if whole or not anywhere.isdisjoint(key.split("|"))]
    if not whole and len(blocks) == 1:
        usual = list(sort.always[:SUREST])
    for number, (block, seen) in enumerate(zip(blocks, held, strict=True), 1):
        beside = [one for key, ones in sort.together.items() if whole and key in seen for one in ones]
        missing = [key for key in dict.fromkeys([*usual, *beside]) if seen.isdisjoint(key.split("|"))]
        if missing:
            what = "ends early" if number == len(blocks) else "is not whole"
            yield f"line {block.line}: the record {what}, without {', '.join(key.partition('|')[0] for key in missing)}"


def _formless(block: Block) -> Iterator[str]:
    for key, form in FORMS.items():
        value = block.values.get(key)
        if value is not None and value not in NOTHING and not form.fullmatch(value):
            del block.values[key]
            yield f"line {block.lines[key]}: {key}={value[:60]} is damaged; nothing is read from it"
    for key in ("NodeList", "Nodes"):
        value = block.values.get(key)
        try:
            names = None if value is None or value in NOTHING else expand_hostlist(value)
        except ToolkitError as error:
            del block.values[key]
            yield f"line {block.lines[key]}: {key} is damaged: {error.message}"
            continue
        if names and any("=" in name or "(" in name for name in names):
            yield f"line {block.lines[key]}: {key}={(value or '')[:60]} names no nodes"


def _unknown_state(block: Block, key: str, known: Collection[str]) -> Iterator[str]:
    value = block.values.get(key)
    if value is not None and not made_of(value, known):
        yield f"line {block.lines[key]}: {key}={value[:60]} is cut, or no state of Slurm's"


def made_of(value: str, known: Collection[str]) -> bool:
    return all(word.rstrip("*~#!%$@^-") in known for word in re.split(r"[+,]", value))


def of_job(block: Block) -> Iterator[str]:
    tres = "AllocTRES" if block.values.get("AllocTRES") not in (None, *NOTHING) else "TRES"
    yield from _same(block, "NumNodes", tres, "node")
    yield from _same(block, "NumCPUs", tres, "cpu")
    if block.values.get("JobState") != "COMPLETING":
        yield from _as_many(block, "NumNodes", "NodeList")
    yield from _ordered(block, "TRES", "AllocTRES", "ReqTRES")
    lost = set(_tres(block, "ReqTRES")) - set(_tres(block, "AllocTRES"))
    if _tres(block, "AllocTRES") and lost & {"cpu", "node", "billing"}:
        yield f"line {block.lines['AllocTRES']}: AllocTRES lacks {', '.join(sorted(lost))}, which ReqTRES says"


def of_node(block: Block) -> Iterator[str]:
    sockets, cores, threads, cpus = (
        _int(block, key) for key in ("Sockets", "CoresPerSocket", "ThreadsPerCore", "CPUTot")
    )
    if sockets and cores and threads and cpus and cpus not in (sockets * cores * threads, sockets * cores):
        yield (
            f"line {block.lines['CPUTot']}: CPUTot={cpus}, but Sockets={sockets} times CoresPerSocket={cores} times "
            f"ThreadsPerCore={threads} is {sockets * cores * threads}"
        )
    if not {"CoreSpecCount", "CPUSpecList"} & block.seen:  # what is kept for the system is not among the TRES
        yield from _same(block, "CPUEfctv" if "CPUEfctv" in block.values else "CPUTot", "CfgTRES", "cpu")
    if "MemSpecLimit" not in block.seen:
        yield from _same(block, "RealMemory", "CfgTRES", "mem")
    yield from _same(block, "CPUAlloc", "AllocTRES", "cpu")
    yield from _ordered(block, "CfgTRES", "AllocTRES")
    yield from _of_kernel(block)
    available, active = (block.values.get(key, "") for key in ("AvailableFeatures", "ActiveFeatures"))
    if active not in NOTHING and available and not _part_of(active.split(","), available.split(",")):
        yield f"line {block.lines['ActiveFeatures']}: ActiveFeatures and AvailableFeatures do not fit each other"


def _of_kernel(block: Block) -> Iterator[str]:
    """What `uname` says ends with a date, where it has one."""
    system = block.values.get("OS", "")
    if _DAY.search(system) and not _DATE.search(system):
        yield f"line {block.lines['OS']}: OS is damaged, its date is not whole: {system[-60:]!r}"


def of_partition(block: Block) -> Iterator[str]:
    yield from _same(block, "TotalNodes", "TRES", "node")
    yield from _same(block, "TotalCPUs", "TRES", "cpu")
    yield from _as_many(block, "TotalNodes", "Nodes")
    yield from _ordered(block, "TRES")


def _int(block: Block, key: str) -> int | None:
    return whole_number(block.values.get(key))


def _tres(block: Block, key: str) -> dict[str, str]:
    value = block.values.get(key)
    return (
        {} if value is None or value in NOTHING else dict(one.split("=", 1) for one in value.split(",") if "=" in one)
    )


def _same(block: Block, key: str, tres: str, name: str) -> Iterator[str]:
    """A number that stands among the TRES, too."""
    number, there = _int(block, key), _tres(block, tres).get(name)
    if there is None:
        if number and _tres(block, tres):
            yield f"line {block.lines[tres]}: {tres} does not say {name}, which {key} does"
        return
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([MGTP]?)", there)
    if number is None or match is None:
        return
    unit = _MEGABYTES[match[2]]
    places = len(match[1].partition(".")[2])
    rounded = unit * 10.0**-places if unit > 1 else 0.0
    if abs(float(match[1]) * unit - number) > rounded:
        yield f"line {block.lines[key]}: {key}={number}, but {tres} says {name}={there}"


def _as_many(block: Block, key: str, nodes: str) -> Iterator[str]:
    number, value = _int(block, key), block.values.get(nodes)
    if number is None or value is None or value in NOTHING:
        return
    try:
        named = len(expand_hostlist(value))
    except ToolkitError:
        return  # it was named already
    if named != number:
        yield f"line {block.lines[nodes]}: {key}={number}, but {nodes} names {named}: {value[:60]!r}"


def _ordered(block: Block, *keys: str) -> Iterator[str]:
    for key in keys:
        ranks = [_ORDER.get(name, len(_ORDER)) for name in _tres(block, key)]
        if ranks != sorted(ranks):
            yield f"line {block.lines[key]}: {key} is not in Slurm's order: {block.values[key][:60]!r}"


def _part_of(some: Sequence[str], all_of_them: Sequence[str]) -> bool:
    """Whether they stand among the others, in the same order."""
    return list(some) == [one for one in all_of_them if one in set(some)]

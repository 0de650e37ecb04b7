"""Is a value one that NCCL reads as it was meant?

NCCL reads numbers with C's `strtoll(text, 0, 0)`: `true` is 0, `4M` is 4, `010` is 8, and nothing is said.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable

from toolkit.topology.nccl.finding import Finding, Given, found
from toolkit.topology.nccl.variable import Variable, Version, before

_LEADING = re.compile(r"\s*([+-]?(?:0[xX][0-9a-fA-F]+|[0-9]+))", re.ASCII)
_RANGE = re.compile(r"(-?[0-9]+)\.\.([0-9]*)")
_SIZES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
# The legacy numbers of distances, as NCCL still translates them.
OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
ALGORITHMS = ("ring", "tree", "collnet", "collnetchain", "collnetdirect", "nvls", "nvlstree", "pat")
PROTOCOLS = ("LL", "LL128", "Simple")
SUBSYSTEMS = (
    "INIT COLL P2P SHM NET GRAPH TUNING ENV ALLOC ALLOC_HOST CALL PROXY NVLS BOOTSTRAP REG PROFILE RAS DESTROY ALL"
)
FUNCTIONS = ("allgather", "allreduce", "broadcast", "reduce", "reducescatter")
_YES = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}

Problem = tuple[str, str]  # why it is wrong, and the fix


def check_value(given: Given, known: Variable, version: Version | None) -> list[Finding]:
    """What is wrong with the value itself."""
    if not given.value.strip():
        return []  # as if it were not set
    word, _, words = known.form.partition(":")
    problem: Problem | None
    if word in ("word", "list"):
        problem = _words(given, words.split("/"), several=word == "list")
    elif word in ("level", "gdr"):
        problem = _level(given, words.split("/"))
    elif word in _FORMS:
        problem = _FORMS[word](given, version)
    elif word[:1].isdigit() or word.startswith("-"):
        problem = _whole(given, word)
    else:
        problem = None
    return [found("wrong", given, known, *problem)] if problem else []


def as_c_reads(text: str) -> int:
    """The number that C's strtoll makes of a text."""
    match = _LEADING.match(text)
    if not match:
        return 0
    digits = match[1].lstrip("+-")[:40]  # far beyond 64 bits
    base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") and len(digits) > 1 else 10
    octal = re.match("[0-7]+", digits)
    value = int(octal[0] if base == 8 and octal else digits, base)
    return -value if match[1].startswith("-") else value


def _whole(given: Given, form: str) -> Problem | None:
    """A whole number, or the reason why NCCL takes it for another."""
    text = given.value.strip()
    read = as_c_reads(text)
    allowed = _allowed(form)
    if text.lower() in _YES and form == "0..1":
        return f"NCCL reads a number here, and {text!r} as 0", f"{given.name}={_YES[text.lower()]}"
    if not re.fullmatch(r"[+-]?([0-9]+|0[xX][0-9a-fA-F]+)", text):
        return f"no whole number: NCCL reads {text!r} as {read}", f"give {allowed}"
    if re.fullmatch(r"[+-]?0[0-9]+", text):
        return f"a number that begins with 0 is octal: NCCL reads {text} as {read}", f"{given.name}={text.lstrip('0')}"
    if given.name == "NCCL_IB_TIMEOUT" and (read == 0 or read > 31):
        return f"NCCL takes {read} for no time-out at all: a broken link hangs for ever", "give 1 to 31; 20 is default"
    if abs(read) >= 1 << 63:
        return f"{text[:40]} has more than 64 bits: NCCL takes its default", f"give {allowed}"
    if not _inside(read, form):
        return f"{read} is out of range", f"give {allowed}"
    return None


def _inside(number: int, form: str) -> bool:
    if match := _RANGE.fullmatch(form):
        return int(match[1]) <= number and (not match[2] or number <= int(match[2]))
    return str(number) in form.split("/")


def _allowed(form: str) -> str:
    if match := _RANGE.fullmatch(form):
        return f"{match[1]} to {match[2]}" if match[2] else f"a whole number from {match[1]} on"
    return f"one of {', '.join(form.split('/'))}"


def _bytes(given: Given, version: Version | None) -> Problem | None:
    text = given.value.strip()
    unit = re.fullmatch(r"([0-9]+)\s*([kmg])i?b?", text.lower())
    if unit:
        return (
            f"NCCL knows no units: it reads {text!r} as {as_c_reads(text)} bytes",
            f"{given.name}={int(unit[1]) * _SIZES[unit[2]]}",
        )
    return _whole(given, "0..")


def _words(given: Given, words: list[str], *, several: bool) -> Problem | None:
    parts = [part.strip() for part in given.value.lstrip("^").split(",")] if several else [given.value]
    fold = {word.upper(): word for word in words}
    exact = given.name in ("NCCL_SOCKET_FAMILY", "NCCL_IB_ADDR_FAMILY")
    for part in parts:
        if part.lstrip("^").upper() not in fold or (exact and part not in words):
            near = difflib.get_close_matches(part.upper(), fold, n=1, cutoff=0.5)
            listed = f"give {'some' if several else 'one'} of {', '.join(words)}"
            return f"NCCL does not know {part!r}", f"did you mean {fold[near[0]]}? {listed}" if near else listed
    return None


def _level(given: Given, words: list[str]) -> Problem | None:
    text = given.value
    listed = f"one of {', '.join(words)}"
    if text in words:
        return None
    if re.fullmatch(r"[0-9].*", text):
        name = OLD_LEVELS[min(as_c_reads(text), len(OLD_LEVELS) - 1)]
        return (
            f"numbers of distances are discouraged, since what they mean can change: today {text} is {name}",
            f"{given.name}={name}",
        )
    if text.upper() in words:
        return "NCCL compares letters exactly, and passes this over in silence", f"{given.name}={text.upper()}"
    if text.upper() == "NODE":
        return (
            "NODE is a word of `nvidia-smi topo -m`: NCCL passes it over in silence, and chooses itself",
            f"take it out; or give PHB for the same NUMA node, SYS for any distance ({listed})",
        )
    if text == "NVL":
        return "no NIC hangs on NVLink: this means never", f"give {listed}"
    return f"NCCL does not know {text!r}, passes it over in silence, and chooses itself", f"give {listed}"


def _choices(given: Given, names: tuple[str, ...], version: Version | None) -> Problem | None:
    """`ring,tree` and, from 2.24 on, `allreduce:tree;broadcast:^ring`."""
    fold = {name.lower() for name in names}
    for entry in given.value.split(";"):
        function, colon, chosen = entry.rpartition(":")
        if (colon or ";" in given.value) and before(version, (2, 24)):
            return "algorithms for single functions are read from NCCL 2.24 on", "give one list, such as ring,tree"
        if colon and function.strip().lower() not in FUNCTIONS:
            return f"NCCL knows no function {function!r}", f"give one of {', '.join(FUNCTIONS)}"
        for word in chosen.lstrip("^").split(","):
            if word.strip().lower() not in fold:
                near = difflib.get_close_matches(word.lower(), fold, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}? " if near else ""
                return f"NCCL does not know {word!r}, and from 2.24 on fails", f"{hint}give some of {', '.join(names)}"
    return None


def _cidr(given: Given, version: Version | None) -> Problem | None:
    try:
        ipaddress.ip_network(given.value, strict=False)
    except ValueError:
        return f"{given.value!r} is no range of addresses", "give one such as 10.0.0.0/8"
    return None


def _real(given: Given, version: Version | None) -> Problem | None:
    try:
        positive = float(given.value) > 0
    except ValueError:
        positive = False
    return None if positive else ("no number above 0: NCCL takes 1", "give a number such as 2")


def _number(given: Given, version: Version | None) -> Problem | None:
    if re.fullmatch(r"-?([0-9]+|0[xX][0-9a-fA-F]+)", given.value.strip()):
        return None
    return f"no whole number: {given.value!r}", "give one, decimal or 0x..."


def _file(given: Given, version: Version | None) -> Problem | None:
    if given.value.startswith("~"):
        return "NCCL does not know ~, and looks for a folder of that name", "give the whole path"
    return None


def _policies(given: Given, version: Version | None) -> Problem | None:
    words = given.value.split("|")
    known = ("DEFAULT", "EFFICIENCY", "ZERO")
    if given.value in ("0", "1", "2") or all(word in known for word in words):
        return None
    return f"NCCL does not know {given.value!r}", f"give {', '.join(known)}, or several with | between"


def _netdevs(given: Given, version: Version | None) -> Problem | None:
    if re.fullmatch(r"AUTO|ALL|MAX:[1-9][0-9]*", given.value):
        return None
    return f"NCCL does not know {given.value!r}", "give ALL or MAX:N"


def _secret(given: Given, version: Version | None) -> Problem | None:
    return None if len(given.value) >= 32 else ("a key of fewer than 32 letters is refused", "give a longer one")


_FORMS: dict[str, Callable[[Given, Version | None], Problem | None]] = {
    "bytes": _bytes,
    "cidr": _cidr,
    "real": _real,
    "number": _number,
    "file": _file,
    "policies": _policies,
    "netdevs": _netdevs,
    "secret": _secret,
    "subsystems": lambda given, version: _words(given, SUBSYSTEMS.split(), several=True),
    "algorithms": lambda given, version: _choices(given, ALGORITHMS, version),
    "protocols": lambda given, version: _choices(given, PROTOCOLS, version),
}

"""Check that NCCL reads the value of a variable as the user meant it.

NCCL parses numbers with `strtoll(text, 0, 0)`: without a message, it reads `true` as 0, `4M` as 4 and `010` as 8.
"""

import difflib
import ipaddress
import re
from collections.abc import Sequence

from toolkit.topology.nccl.finding import Finding, Given, finding_of
from toolkit.topology.nccl.variables import Variable, Version, forms, is_before

_LEADING = re.compile(r"\s*([+-]?(?:0[xX][0-9a-fA-F]+|[0-9]+))", re.ASCII)
_RANGE = re.compile(r"(-?[0-9]+)\.\.([0-9]*)")
_SIZES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
# The levels into which NCCL still translates legacy numeric distances.
_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
_FUNCTIONS = ("allgather", "allreduce", "broadcast", "reduce", "reducescatter")
_FLAGS = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}

Problem = tuple[str, str]  # the reason, and the fix


def check_value(given: Given, known: Variable, version: Version | None) -> list[Finding]:
    """Return findings about the value alone; NCCL treats an empty value as unset."""
    if not given.value.strip():
        return []
    form, _, words = known.form.partition(":")
    problem: Problem | None = None
    if form in ("word", "list"):
        problem = _words(given, words.split("/"), several=form == "list")
    elif form in ("level", "gdr"):
        problem = _level(given, words.split("/"))
    elif form == "choices":
        problem = _choices(given, words.split("/"), version)
    elif form == "bytes":
        problem = _bytes(given)
    elif form == "cidr":
        problem = _cidr(given)
    elif form in forms():
        known_form = forms()[form]
        if not re.fullmatch(known_form.pattern, given.value, re.DOTALL):
            problem = known_form.why.replace("{value!r}", repr(given.value)), known_form.fix
    elif form[:1].isdigit() or form.startswith("-"):
        problem = _integer(given, form)
    return [finding_of("wrong", given, known, *problem)] if problem else []


def as_c_reads(text: str) -> int:
    """Return the number that `strtoll` in C parses from a string."""
    match = _LEADING.match(text)
    if not match:
        return 0
    digits = match[1].lstrip("+-")[:40]  # longer than any 64-bit number
    base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") and len(digits) > 1 else 10
    octal = re.match("[0-7]+", digits)
    value = int(octal[0] if base == 8 and octal else digits, base)
    return -value if match[1].startswith("-") else value


def _integer(given: Given, form: str) -> Problem | None:
    """Return the problem of a value that NCCL reads as another integer, or that is out of range; None if it is valid."""
    text = given.value.strip()
    number = as_c_reads(text)
    if match := _RANGE.fullmatch(form):
        in_range = int(match[1]) <= number and (not match[2] or number <= int(match[2]))
        allowed = f"{match[1]} to {match[2]}" if match[2] else f"an integer of {match[1]} or more"
    else:
        in_range, allowed = str(number) in form.split("/"), f"one of {', '.join(form.split('/'))}"
    if text.lower() in _FLAGS and form == "0..1":
        return f"NCCL expects a number, so it reads {text!r} as 0", f"{given.name}={_FLAGS[text.lower()]}"
    if not re.fullmatch(r"[+-]?([0-9]+|0[xX][0-9a-fA-F]+)", text):
        return f"expected an integer: NCCL reads {text!r} as {number}", f"set {allowed}"
    if re.fullmatch(r"[+-]?0[0-9]+", text):
        return f"a number with a leading 0 is octal: NCCL reads {text} as {number}", f"{given.name}={text.lstrip('0')}"
    if given.name == "NCCL_IB_TIMEOUT" and (number == 0 or number > 31):
        return f"{number} disables the timeout, so a broken link hangs forever", "set 1 to 31; the default is 20"
    if abs(number) >= 1 << 63:
        return f"{text[:40]} does not fit into 64 bits, so NCCL uses its default", f"set {allowed}"
    return None if in_range else (f"{number} is out of range", f"set {allowed}")


def _bytes(given: Given) -> Problem | None:
    text = given.value.strip()
    if unit := re.fullmatch(r"([0-9]+)\s*([kmg])i?b?", text.lower()):
        why = f"NCCL does not support units, so it reads {text!r} as {as_c_reads(text)} bytes"
        return why, f"{given.name}={int(unit[1]) * _SIZES[unit[2]]}"
    return _integer(given, "0..")


def _question(word: str, words: Sequence[str]) -> str:
    """Return "did you mean X? " with the most similar of `words`; "" if none is similar."""
    by_case = {one.upper(): one for one in words}
    similar = difflib.get_close_matches(word.upper(), by_case, n=1, cutoff=0.5)
    return f"did you mean {by_case[similar[0]]}? " if similar else ""


def _words(given: Given, words: Sequence[str], *, several: bool) -> Problem | None:
    parts = [part.strip() for part in given.value.lstrip("^").split(",")] if several else [given.value]
    uppercase = {word.upper() for word in words}
    is_exact = given.name in ("NCCL_SOCKET_FAMILY", "NCCL_IB_ADDR_FAMILY")
    for part in parts:
        if part.lstrip("^").upper() not in uppercase or (is_exact and part not in words):
            allowed = f"{'some' if several else 'one'} of {', '.join(words)}"
            return f"NCCL does not know {part!r}", f"{_question(part, words)}set {allowed}"
    return None


def _level(given: Given, words: Sequence[str]) -> Problem | None:
    text, allowed = given.value, f"one of {', '.join(words)}"
    if text in words:
        return None
    if re.fullmatch(r"[0-9].*", text):
        name = _LEVELS[min(as_c_reads(text), len(_LEVELS) - 1)]
        why = f"NCCL discourages numeric distances, since their meaning can change: today {text} is {name}"
        return why, f"{given.name}={name}"
    if text.upper() in words:
        return "NCCL is case-sensitive, and ignores this value without a message", f"{given.name}={text.upper()}"
    if text.upper() == "NODE":
        why = "NODE is a level of `nvidia-smi topo -m`: NCCL ignores it without a message, and uses its default"
        return why, f"remove it; or set PHB for the same NUMA node, SYS for any distance ({allowed})"
    if text == "NVL":
        return "NICs never connect over NVLink, so NVL means never", f"set {allowed}"
    return f"NCCL does not know {text!r}, ignores it without a message, and uses its default", f"set {allowed}"


def _choices(given: Given, names: Sequence[str], version: Version | None) -> Problem | None:
    """Return the problem of a list like `ring,tree` or, since 2.24, `allreduce:tree;broadcast:^ring`; None if valid."""
    for entry in given.value.split(";"):
        function, colon, chosen = entry.rpartition(":")
        if (colon or ";" in given.value) and is_before(version, (2, 24)):
            return "NCCL supports choices per function only since 2.24", "set one list, such as ring,tree"
        if colon and function.strip().lower() not in _FUNCTIONS:
            return f"{function!r} is not a function of NCCL", f"set one of {', '.join(_FUNCTIONS)}"
        for word in chosen.lstrip("^").split(","):
            if word.strip().lower() not in [name.lower() for name in names]:
                why = f"NCCL does not know {word!r}, and since 2.24 it fails"
                return why, f"{_question(word, names)}set some of {', '.join(names)}"
    return None


def _cidr(given: Given) -> Problem | None:
    try:
        ipaddress.ip_network(given.value, strict=False)
    except ValueError:
        return f"{given.value!r} is not a valid address range", "set a range such as 10.0.0.0/8"
    return None

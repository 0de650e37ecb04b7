"""Lists of adapters and interfaces: each word is the beginning of a name, unless the list begins with `=`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolkit.topology.nccl.finding import Finding, Given, found
from toolkit.topology.nccl.variable import Variable

TORCH_INTERFACES = "https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use"
_DRIVERS = frozenset({"mlx4", "mlx5", "hfi1"})  # all adapters of a driver, as the prefix is meant
_NUMBERED = re.compile(r"(.*[^0-9])([0-9]+)")


def check_list(given: Given, known: Variable, here: Sequence[str] | None, *, sure: bool = False) -> list[Finding]:
    """What is wrong with a list of names.

    Args:
        here: names of the devices on a node; None where nobody knows them.
        sure: it is a node that the ranks run on, and no login node with devices of its own.
    """
    text = given.value
    if not text.strip():
        return []
    exclude, exact, names = read_list(text)
    if form := _form_problem(given, text):
        return [found("wrong", given, known, *form)]
    missing = [] if here is None or exclude else [name for name in names if not _matches(name, here, exact)]
    if not missing:
        return [] if exact else _prefixes(given, known, here, names, exclude)
    why = f"no device of the node is called {' or '.join(missing)} (there are {', '.join(here or ()) or 'none'})"
    absent = found("wrong" if sure else "note", given, known, why, "give names of devices that the ranks' nodes have")
    return [absent, *([] if exact else _prefixes(given, known, None, names, exclude))]


def read_list(text: str) -> tuple[bool, bool, list[str]]:
    """(whether it excludes, whether names are exact, the names without ports)."""
    exclude = text.startswith("^")
    rest = text[1:] if exclude else text
    exact = rest.startswith("=")
    return exclude, exact, [word.partition(":")[0] for word in (rest[1:] if exact else rest).split(",") if word]


def _form_problem(given: Given, text: str) -> tuple[str, str] | None:
    rest = re.sub(r"^\^?=?", "", text)
    marks = ("^" if "^" in text else "") + ("=" if "=" in text else "")
    names = [word.strip("=^") for word in re.split(r"[\s,]+", rest) if word.strip("=^")]
    mended = f"{given.name}={marks}{','.join(names)}"
    if re.search(r"\s", text):
        return "a space belongs to the name that it stands in, so that nothing is called so", mended
    if "=" in rest or "^" in rest:
        sign = "=" if "=" in rest else "^"
        why = f"{sign!r} counts at the beginning of the list, ^ before =: here it belongs to a name that nothing has"
        return why, mended
    return None


def _matches(name: str, here: Sequence[str], exact: bool) -> list[str]:
    return [one for one in here if (one == name if exact else one.startswith(name))]


def _prefixes(
    given: Given, known: Variable, here: Sequence[str] | None, names: list[str], exclude: bool
) -> list[Finding]:
    """Words that mean more devices than the one whose name they are."""
    marks = "^=" if exclude else "="
    fix = f"{given.name}={marks}{given.value.lstrip('^')}"
    if here is not None:
        more = {name: [one for one in _matches(name, here, False) if one != name] for name in names if name in here}
        told = [f"{name} also means {', '.join(others)}" for name, others in more.items() if others]
        if told:
            return [found("wrong", given, known, f"each word is a prefix: {'; '.join(told)}", fix)]
        if more:
            return [found("note", given, known, "each word is a prefix; here it means no other device", fix)]
        return []
    numbered = [match for name in names if name not in _DRIVERS and (match := _NUMBERED.fullmatch(name))]
    # Nodes with more than ten adapters are common, with more than ten numbered interfaces rare.
    risky = [match[0] for match in numbered if known.form == "adapters" and match[2] in "123456789"]
    if risky:
        why = f"each word is a prefix: {risky[0]} also means {risky[0]}0 to {risky[0]}9, where there are such"
        return [found("wrong", given, known, why, fix)]
    if numbered:
        why = f"each word is a prefix: {numbered[0][0]} also means all that begin so, where there are such"
        return [found("note", given, known, why, fix)]
    return []


def check_gloo(given: Given, here: Sequence[str] | None) -> list[Finding]:
    """gloo takes whole names: NCCL's signs belong to a name there."""
    known = Variable(given.name, (), "torch", "interfaces", "", "chooses the IP interfaces of gloo")
    if given.value[:1] in ("=", "^"):
        why = f"gloo takes names as they are, and finds no interface {given.value!r}"
        fix = f"{given.name}={given.value.lstrip('=^')}"
        return [found("wrong", given, known, why, fix, TORCH_INTERFACES)]
    missing = [name for name in given.value.split(",") if here is not None and name and name not in here]
    if missing:
        why = f"no interface of this node is called {missing[0]} (there are {', '.join(here or ()) or 'none'})"
        return [found("note", given, known, why, "give a name that the ranks' nodes have", TORCH_INTERFACES)]
    return []

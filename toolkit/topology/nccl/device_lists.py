"""Check lists of adapters and interfaces, such as NCCL_IB_HCA; names are prefixes unless the list starts with `=`."""

import re
from collections.abc import Sequence

from toolkit.topology.nccl.finding import Finding, Given, finding_of
from toolkit.topology.nccl.variables import Variable

TORCH_INTERFACES = "https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use"
_DRIVERS = frozenset({"mlx4", "mlx5", "hfi1"})  # names of drivers, valid as prefixes of all their adapters
_NUMBERED = re.compile(r"(.*[^0-9])([0-9]+)")


def check_list(given: Given, known: Variable, here: Sequence[str] | None, *, sure: bool = False) -> list[Finding]:
    """Return findings about a list of device names.

    Args:
        here: names of the devices on this node; None if unknown.
        sure: whether ranks run on such nodes; if not, this may be a login node with other devices.
    """
    text = given.value
    if not text.strip():
        return []
    is_exclusion, is_exact, names = _read_list(text)
    if problem := _syntax_problem(given, text):
        return [finding_of("wrong", given, known, *problem)]
    missing = [] if here is None or is_exclusion else [name for name in names if not _matches(name, here, is_exact)]
    if not missing:
        return [] if is_exact else _prefixes(given, known, here, names, is_exclusion)
    why = f"the node has no device {' or '.join(missing)} (it has {', '.join(here or ()) or 'none'})"
    absent = finding_of(
        "wrong" if sure else "note", given, known, why, "set names of devices that exist on the compute nodes"
    )
    return [absent, *([] if is_exact else _prefixes(given, known, None, names, is_exclusion))]


def _read_list(text: str) -> tuple[bool, bool, list[str]]:
    """Return (whether the list excludes devices, whether names are exact, the names without ports)."""
    is_exclusion = text.startswith("^")
    rest = text.removeprefix("^")
    words = rest.removeprefix("=").split(",")
    return is_exclusion, rest.startswith("="), [word.partition(":")[0] for word in words if word]


def _syntax_problem(given: Given, text: str) -> tuple[str, str] | None:
    rest = re.sub(r"^\^?=?", "", text)
    marks = ("^" if "^" in text else "") + ("=" if "=" in text else "")
    names = [word.strip("=^") for word in re.split(r"[\s,]+", rest) if word.strip("=^")]
    fixed = f"{given.name}={marks}{','.join(names)}"
    if re.search(r"\s", text):
        return "NCCL treats a space as part of a name, which then matches no device", fixed
    if "=" in rest or "^" in rest:
        sign = "=" if "=" in rest else "^"
        return (
            f"{sign!r} is valid only at the start of the list, with ^ before =; elsewhere NCCL treats it as part of a name",
            fixed,
        )
    return None


def _matches(name: str, here: Sequence[str], is_exact: bool) -> list[str]:
    return [device for device in here if (device == name if is_exact else device.startswith(name))]


def _prefixes(
    given: Given, known: Variable, here: Sequence[str] | None, names: list[str], is_exclusion: bool
) -> list[Finding]:
    """Return findings about names that are also prefixes of other devices."""
    marks = "^=" if is_exclusion else "="
    fix = f"{given.name}={marks}{given.value.lstrip('^')}"
    if here is not None:
        matched = {name: [one for one in _matches(name, here, False) if one != name] for name in names if name in here}
        if further := [f"{name} also matches {', '.join(others)}" for name, others in matched.items() if others]:
            return [finding_of("wrong", given, known, f"each name is a prefix: {'; '.join(further)}", fix)]
        why = "each name is a prefix; on this node it matches no other device"
        return [finding_of("note", given, known, why, fix)] if matched else []
    numbered = [match for name in names if name not in _DRIVERS and (match := _NUMBERED.fullmatch(name))]
    # Nodes with more than ten adapters are common, but nodes with more than ten interfaces of one prefix are rare.
    if risky := [match[0] for match in numbered if known.form == "adapters" and match[2] in "123456789"]:
        why = f"each name is a prefix: {risky[0]} also matches {risky[0]}0 to {risky[0]}9 on nodes that have them"
        return [finding_of("wrong", given, known, why, fix)]
    if numbered:
        why = f"each name is a prefix: {numbered[0][0]} also matches every longer name on nodes that have one"
        return [finding_of("note", given, known, why, fix)]
    return []


def check_gloo(given: Given, here: Sequence[str] | None) -> list[Finding]:
    """Return findings about GLOO_SOCKET_IFNAME: gloo expects full interface names, without the signs of NCCL."""
    known = Variable(given.name, "torch", "interfaces", "chooses the IP interfaces of gloo")
    if given.value[:1] in ("=", "^"):
        why = f"gloo reads names literally, so it finds no interface {given.value!r}"
        fix = f"{given.name}={given.value.lstrip('=^')}"
        return [finding_of("wrong", given, known, why, fix, TORCH_INTERFACES)]
    missing = [name for name in given.value.split(",") if here is not None and name and name not in here]
    if not missing:
        return []
    why = f"this node has no interface {missing[0]} (it has {', '.join(here or ()) or 'none'})"
    return [finding_of("note", given, known, why, "set a name that exists on the compute nodes", TORCH_INTERFACES)]

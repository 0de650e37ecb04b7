"""Expand Slurm hostlists such as `node[1-3,07],login`."""

from toolkit.errors import ToolkitError

__all__ = ["expand_hostlist", "first_host"]

MOST_HOSTS = 100_000  # more is probably a typo; Slurm accepts at most 65,536 per range


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of a hostlist in order, without duplicates.

    Leading zeros keep their width (`n[008-010]`); the last of several brackets varies fastest; commas and whitespace
    separate expressions. Raises ToolkitError if the hostlist is invalid, or has more than `MOST_HOSTS` hosts.
    """
    hosts: list[str] = []
    for part in _split(text):
        hosts += _expand_one(part, text, MOST_HOSTS - len(hosts))
    return list(dict.fromkeys(hosts))


def first_host(text: str) -> str:
    """Return the first host of a hostlist; ToolkitError if it is empty."""
    hosts = expand_hostlist(text)
    if not hosts:
        raise _bad(text, "does not name a host")
    return hosts[0]


def _split(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _bad(text, "has unbalanced brackets")
        if depth == 0 and (character == "," or character.isspace()):
            parts.append(current)
            current = ""
        else:
            current += character
    if depth:
        raise _bad(text, "has an unclosed bracket")
    return [part for part in [*parts, current] if part]


def _expand_one(part: str, text: str, allowed: int) -> list[str]:
    names = [""]
    rest = part
    while rest:
        prefix, bracket, rest = rest.partition("[")
        names = [name + prefix for name in names]
        if not bracket:
            break
        inside, _, rest = rest.partition("]")
        numbers = _numbers(inside, text, allowed)
        if len(names) * len(numbers) > allowed:
            raise _bad(text, f"names more than {MOST_HOSTS} hosts")
        names = [name + number for name in names for number in numbers]
    return names


def _numbers(inside: str, text: str, allowed: int) -> list[str]:
    numbers: list[str] = []
    for item in inside.split(","):
        low, dash, high = item.strip().partition("-")
        if not _is_number(low) or (dash and not _is_number(high)):
            raise _bad(text, f"contains {item!r} instead of a number or a range")
        if not dash:
            numbers.append(low)
            continue
        count = int(high) - int(low) + 1
        if count < 1:
            raise _bad(text, f"contains the decreasing range {item!r}")
        if len(numbers) + count > allowed:
            raise _bad(text, f"names more than {MOST_HOSTS} hosts")
        numbers += [str(value).zfill(len(low)) for value in range(int(low), int(high) + 1)]
    return numbers


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()  # "²" is a digit too, but not a number


def _bad(text: str, problem: str) -> ToolkitError:
    shown = text if len(text) < 80 else text[:77] + "..."
    return ToolkitError(f"the host list {shown!r} {problem}", fix="use Slurm's form, such as node[1-4,8]")

"""The lines of an output of a fabric command, without what terminals, logs and mails put around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.errors import CheckFailedError

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# The prompt at which the command was given.
_PROMPT = re.compile(r"(\[[^\]]*\]|[\w.@:~/-]+)?[$#%>] \S.*")
# Drivers' names of devices, by how they begin; udev and sites choose others, of which nothing is known.
_DEVICES = {
    "mlx": re.compile(r"mlx[45]_(?:[a-zA-Z]\w*)?[0-9]+"),
    "hfi1": re.compile("hfi1_[0-9]+"),
    "bnxt": re.compile(r"bnxt_re(?:_?[a-z]\w*)?[0-9]+"),
    "irdma": re.compile("irdma[0-9]+"),
    "cxi": re.compile("cxi[0-9]+"),
    "enp": re.compile(r"enp[0-9]+s[0-9]+(?:f[0-9]+)?(?:d[0-9]+)?(?:np[0-9]+)?(?:v[0-9]+)?(?:[.:][0-9]+)?"),
    "rdmap": re.compile("rdmap[0-9]+s[0-9]+(?:-.*)?"),
}


@dataclass(frozen=True)
class Line:
    """One line that is not blank; `cut` is the last one when no line end stands behind it."""

    number: int
    text: str
    cut: bool


def read_lines(
    text: str, evidence: re.Pattern[str], command: str, warnings: list[str], *, prompts: bool = True
) -> list[Line]:
    """The lines with something on them, without blanks around them.

    `evidence` matches lines that only this command prints. What stands before such a line on most lines (a host's name,
    a time, the mark of a quotation) is taken off; digits may differ. `prompts`: lines that look like one are dropped.

    Raises:
        CheckFailedError: no line is the command's.
    """
    raw = [_ESCAPES.sub("", line).replace("\r", "") for line in text.split("\n")]
    numbered = [(number, line.strip()) for number, line in enumerate(raw, 1) if line.strip()]
    if not numbered:
        raise CheckFailedError(f"nothing that {command} prints: the text is empty", where="line 1")
    numbered = _without_prefix(numbered, evidence)
    if not any(evidence.match(line) for _, line in numbered):
        raise CheckFailedError(f"not what {command} prints: {numbered[0][1][:60]!r}", where=f"line {numbered[0][0]}")
    if raw[-1]:
        warnings.append(f"line {len(raw)}: no line end stands behind it, so that it may be cut")
    return [
        Line(number, line, number == len(raw))
        for number, line in numbered
        if line and not (prompts and _PROMPT.fullmatch(line))
    ]


def strange(line: Line, of: str) -> str:
    """The warning for a line that is nothing of the format."""
    return f"line {line.number}: not part of {of}: {line.text[:60]!r}"


def is_odd_device(name: str) -> bool:
    """Whether a name begins as those of a common driver do and goes on as none does: a part of it is lost."""
    return any(name.startswith(begin) and not form.fullmatch(name) for begin, form in _DEVICES.items())


def out_of_order(names: Sequence[str]) -> int | None:
    """The place of the first name that a sorted list would not have there, as text nor by number."""

    def by_number(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", name) if part]

    if list(names) in (sorted(names), sorted(names, key=by_number)):
        return None
    return next(place for place in range(1, len(names)) if by_number(names[place - 1]) > by_number(names[place]))


def _without_prefix(numbered: list[tuple[int, str]], evidence: re.Pattern[str]) -> list[tuple[int, str]]:
    found = next((match for _, line in numbered if (match := evidence.search(line))), None)
    said = found.string[: found.start()].rstrip() if found else ""
    if not said:
        return numbered
    prefix = re.compile(re.sub(r"[0-9]+", "[0-9]+", re.escape(said)))
    if 2 * sum(bool(prefix.match(line)) for _, line in numbered) <= len(numbered):
        return numbered  # it stands before one line by chance
    return [
        (number, prefix.sub("", line, count=1).strip() if prefix.match(line) else line) for number, line in numbered
    ]
